"""Sums of gradients over ranks, beside the backward pass that still computes others: gradient buckets.

    current stream    backward pass: event b, once bucket b is complete
                      chain rule
                      for every bucket: wait for its sum, update its tensors
    side stream       for every bucket: wait for event b, sum its gradients over ranks

The buckets are those of torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704). We deviate because a step is a
replay of CUDA graphs (`step.py`): events are recorded by nodes of a micro-batch's graph, which the tensors' hooks put there
during the capture, and sums stay outside of it. Every replay records the events again, and a stream waits for the latest
record, so the last micro-batch of a step counts. And a bucket is a part of the tensors in the order of the optimizer, not
in that of gradients, since it is updated as a whole.

A bucket is complete when the backward pass has added to the gradients of all its tensors, to each once. Where it adds to one
again, or the chain rule of derived weights does, the bucket's sum waits for all that was launched before it. So do all sums
of a rank whose last micro-batch is no graph, or that has none. All ranks sum the buckets in one order, that in which they
are complete on the first rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial

import torch
from torch import Tensor

from requant import ranks
from requant.finetune.divided import gradient_of, started_sum

BucketEvents = Mapping[int, torch.cuda.Event]  # bucket -> when it is complete


class GradientBuckets:
    """The tensors of each bucket, and the order in which all ranks sum their gradients."""

    def __init__(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        self.buckets = buckets
        self.order = list(range(len(buckets)))
        self.in_chain_rule: set[int] = set()

    @contextmanager
    def events_of_backward(self) -> Iterator[dict[int, torch.cuda.Event]]:
        """While a backward pass is captured in the context: bucket -> the event of its completion, in their order."""
        missing = [set(map(id, bucket)) for bucket in self.buckets]
        events: dict[int, torch.cuda.Event] = {}

        def accumulated(index: int, tensor: Tensor) -> None:
            if id(tensor) not in missing[index]:  # a second time
                events.pop(index, None)
                return
            missing[index].remove(id(tensor))
            if not missing[index]:
                # an external event is a node of the graph; others order the streams of a capture
                events[index] = torch.cuda.Event(external=True)
                events[index].record()

        with self._hooked(accumulated):
            yield events

    @contextmanager
    def noted_in_chain_rule(self) -> Iterator[None]:
        """While the chain rule is captured, note the buckets of which it adds to a gradient."""
        with self._hooked(lambda index, _: self.in_chain_rule.add(index)):
            yield

    def agree_on_order(self, events: Iterable[int]) -> None:
        """On all ranks the order in which buckets are complete on the first; the others after them. All ranks call it."""
        complete = [index for index in events if index not in self.in_chain_rule]
        own = complete + [index for index in self.order if index not in complete]
        self.order, _ = ranks.shared(own, {})

    def started_sum(self, index: int, events: BucketEvents) -> Callable[[], None]:
        """Of a bucket's gradients over ranks, from when it is complete by the `events` of the last micro-batch.

        When the result is called, the sum is done for what the current stream does next.
        """
        if ranks.world_size() == 1:
            return lambda: None
        gradients = [gradient_of(tensor) for tensor in self.buckets[index]]
        if index not in events or index in self.in_chain_rule:
            return started_sum(gradients)
        # What the side stream allocates is read by the current one, and free for the side stream again in the next step:
        # after this wait, which comes after all that the current stream did in this step.
        self._side_stream.wait_event(events[index])
        with torch.cuda.stream(self._side_stream):
            return started_sum(gradients)

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.buckets[0][0].device)

    @contextmanager
    def _hooked(self, accumulated: Callable[[int, Tensor], object]) -> Iterator[None]:
        """Of several ranks: `accumulated(bucket, tensor)` is called whenever something was added to a tensor's gradient."""
        with ExitStack() as hooks:
            for index, bucket in enumerate(self.buckets) if ranks.world_size() > 1 else ():
                for tensor in bucket:
                    handle = tensor.register_post_accumulate_grad_hook(partial(accumulated, index))
                    hooks.callback(handle.remove)
            yield
