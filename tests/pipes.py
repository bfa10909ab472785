"""Objects on their way to another process."""

from multiprocessing import Pipe
from typing import TypeVar

T = TypeVar("T")


def through_a_pipe(sent: T) -> T:
    """What a worker process receives when the object is sent to it."""
    receiver, sender = Pipe(duplex=False)
    with receiver, sender:
        sender.send(sent)
        return receiver.recv()
