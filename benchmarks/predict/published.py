"""The performance models of the papers, as they are printed.

:mod:`hvd_compress.perfmodel` predicts what this package's exchanges cost. The papers drew their
figures with the models here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AppendixB:
    """TernGrad's model (Wen et al., 2017, appendix B). ECQ-SGD, section 6.3, has one of the same origin.

    Gradients are added up along a tree, whole at each level: among a machine's GPUs, to its processor,
    among machines. Nothing overlaps.

    Attributes:
        gpu_bandwidth: between two GPUs of a machine, bytes a second.
        cpu_bandwidth: between GPU and processor.
        network_bandwidth: between machines.
        network_latency: seconds a message between machines.
    """

    gpu_bandwidth: float
    cpu_bandwidth: float
    network_bandwidth: float
    network_latency: float = 0.0

    def communication(self, machines: int, gpus: int, gradient_bytes: float) -> float:
        """Seconds of one exchange, T_comm.

        Args:
            machines: how many.
            gpus: of each machine.
            gradient_bytes: size of the gradient as it is sent, the paper's :math:`|g|`.
        """
        within = gradient_bytes / self.gpu_bandwidth * math.log2(gpus)
        message = self.network_latency + gradient_bytes / self.network_bandwidth
        return within + gradient_bytes / self.cpu_bandwidth + message * math.log2(machines)

    def strong(self, machines: int, gpus: int, one: float, gradient_bytes: float) -> float:
        """Seconds of a step whose images are spread over all GPUs, equation 27.

        Args:
            machines: how many.
            gpus: of each machine.
            one: seconds of the same step on one GPU, the copy to its processor included.
            gradient_bytes: size of the gradient as it is sent.
        """
        computation = (one - gradient_bytes / self.cpu_bandwidth) / (machines * gpus)
        return computation + self.communication(machines, gpus, gradient_bytes)

    def weak(self, machines: int, gpus: int, one: float, gradient_bytes: float) -> float:
        """Seconds of a step in which each GPU has as many images as the only one had, equation 29."""
        computation = one - gradient_bytes / self.cpu_bandwidth
        return computation + self.communication(machines, gpus, gradient_bytes)


def pulled_bits(workers: int) -> float:
    """Bits of an element of TernGrad's sum, which has 2N + 1 levels (Wen et al., 2017, section 3.1).

    Args:
        workers: N, whose ternary numbers with one scale are added up.
    """
    return math.log2(1 + 2 * workers)


@dataclass(frozen=True)
class OneBitCosts:
    """What 1-bit SGD's choice of the number of nodes depends on (Seide et al., 2014, section 2.1).

    Attributes:
        samples: of a minibatch, N.
        per_sample: seconds of one sample's gradient, T_calc^frm.
        post: seconds of one post-processing step of all parameters, T_calc^post.
        post_steps: how many there are, C.
        exchange: seconds of an exchange of float32 numbers, T_comm^float.
        compression: how many times fewer bits are sent, Z.
        update: seconds of adding the gradient to the model, T_calc^upd, on every node.
    """

    samples: int
    per_sample: float
    post: float
    post_steps: int
    exchange: float
    compression: float
    update: float

    def computation(self, nodes: float) -> float:
        """T_calc: what a node computes while half a minibatch is exchanged (section 2.2)."""
        shared = self.samples / 2 * self.per_sample + self.post_steps * self.post
        return shared / nodes + self.update

    def communication(self) -> float:
        """T_comm: of an exchange, which two shots make independent of the number of nodes (section 3.1)."""
        return self.exchange / self.compression

    def optimal_nodes(self) -> float:
        """Equation 4: so many nodes that an exchange takes as long as the computation beside it.

        Infinite where an exchange takes no longer than the update alone (section 2.3): then the network
        never limits.
        """
        shared = self.samples / 2 * self.per_sample + self.post_steps * self.post
        hidden = self.communication() - self.update
        return shared / hidden if hidden > 0 else math.inf
