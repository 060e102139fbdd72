"""Published strategies and baselines, behind one face: what plans are compared with, and what latency may choose.

Zhuang et al., arXiv 2211.05322: send and receive, local and global all-gather, broadcast; naive, load balance, DFS and
randomised greedy order. Alpa's code; binomial tree, chain and two trees.
"""

from remesh.resharding.schedule.paper.baselines import ALGORITHMS, MulticastTask, Order
from remesh.resharding.schedule.paper.cost import CHUNKS_PER_DELAY, COSTS, SliceCast, cost_of
from remesh.resharding.schedule.paper.strategies import STRATEGIES, Routed, Setting, multicast_task

__all__ = [
    "ALGORITHMS",
    "CHUNKS_PER_DELAY",
    "COSTS",
    "STRATEGIES",
    "MulticastTask",
    "Order",
    "Routed",
    "Setting",
    "SliceCast",
    "cost_of",
    "multicast_task",
]
