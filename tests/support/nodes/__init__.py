"""Several nodes on this machine: see `Cluster`."""

from .cluster import Cluster, NodeProcess, forbidden

__all__ = ["Cluster", "NodeProcess", "forbidden"]
