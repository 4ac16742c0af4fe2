"""A group of nodes that starts again without those that were lost: one plan for each generation of the group.

Importing this package imports no torch.
"""
