"""Methods for special cases: a marked tier beside the main path.

Everything here is tested like the rest, and its names can be imported from `lapwing`, but few users need it and no
fit or prediction with default settings runs it; of all tuning, only `la.tune()` without data does (leave-one-out).
Each file uses only what a structure, factor or method of your own could use, so it also serves as an example. A method
leaves this tier when many users need it.
"""
