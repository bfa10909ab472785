"""Attention with shared projections, and a key/value cache that is really smaller.

`import twofold` is light: it loads neither torch nor Transformers and changes nothing. The rooms are
imported by name (`twofold.spec`, `twofold.attention`, ...); `import twofold.hf` registers the models with
Transformers' Auto classes.
"""

__version__ = "0.1.0"
