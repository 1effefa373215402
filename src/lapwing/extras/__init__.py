"""Methods for special cases: a marked tier above the rest of the library.

What stands here is tested like everything else and its names can be imported from `lapwing`, but few users need it, and
nothing in the rooms below depends on it: each file builds on the interfaces that a user's own structure, factor or
method would build on. A method moves down from here when many users need it.
"""
