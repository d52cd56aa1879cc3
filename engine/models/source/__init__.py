"""Where a checkpoint's files come from, and how its parts are loaded; families know `Checkpoint` alone.

`loading` and `own_module` import torch, the others do not.
"""
