"""The calls of streams, events and PyTorch's futures by the code for CUDA devices, from a device's log."""

from __future__ import annotations

import pytest
import torch

from hvd_compress.engine.executors import Executors, keep_from_reuse
from hvd_compress.process_group.step import Bucket
from hvd_compress.process_group.streams import SideStream
from tests.hostdev import hostdev
from tests.hostdev.hostdev import Log, logged
from tests.ranks import on_ranks

DEVICE = {"HVDC_TEST_DEVICE": hostdev.TYPE}
PLACE = (hostdev.TYPE, 0)


@pytest.fixture(autouse=True)
def built() -> None:
    """Builds the device before the rank starts."""
    hostdev.library()


def _tensor() -> torch.Tensor:
    return torch.zeros(3, dtype=torch.float32, device=torch.device(*PLACE))


def _behind(log: Log, later: int, earlier: int) -> bool:
    """Whether a stream waits for an event of another stream, recorded before."""
    recorded = set()
    for what, number, stream in log:
        if what == "record" and stream == earlier:
            recorded.add(number)
        if what == "wait" and stream == later and number in recorded:
            return True
    return False


@on_ranks(1, launcher="torchrun", environment=DEVICE)
def test_a_side_stream() -> None:
    device = torch.device(*PLACE)
    side, tensor = SideStream(device), _tensor()
    current = hostdev.current_stream()
    with logged() as entered, side.entered():
        within = hostdev.current_stream()
        tensor.add_(1)
    assert hostdev.current_stream() == current != within
    assert _behind(entered, within.stream_id, current.stream_id)
    assert {stream for what, _, stream in entered if "aten" in what} == {within.stream_id}
    with logged() as again, side.entered(), side.entered():
        pass
    assert [what for what, _, _ in again] == ["record", "wait"]  # It does not wait for itself.
    with logged() as left:
        side.caught_up()
        side.takes(tensor)
    assert _behind(left, current.stream_id, within.stream_id)
    assert left[-1] == ("record_stream", tensor.data_ptr(), within.stream_id)


@on_ranks(1, launcher="torchrun", environment=DEVICE)
def test_calls_in_several_streams() -> None:
    """Each waits for the streams of earlier calls, unless the caller puts them in order."""
    first, second = (torch.Stream(torch.device(*PLACE)) for _ in range(2))
    for chained in (False, True):
        kernels, tensor = Executors(1, chained=chained), _tensor()
        with logged() as log:
            for stream in (first, second):
                with hostdev.stream(stream):
                    kernels.order(tensor)
        assert _behind(log, second.stream_id, first.stream_id) == (not chained)
        assert not _behind(log, first.stream_id, second.stream_id)
        with logged() as log:
            kernels.settle()
        assert [what for what, _, _ in log] == ["synchronize_device"]
    with logged() as log, hostdev.stream(second):
        keep_from_reuse(tensor)
    assert log == [("record_stream", tensor.data_ptr(), second.stream_id)]


@on_ranks(1, launcher="torchrun", environment=DEVICE)
def test_the_future_of_a_bucket() -> None:
    """Streams that wait for it or for its child come after the stream in which it was completed."""
    device = torch.device(*PLACE)
    side, current = torch.Stream(device), hostdev.current_stream()
    for result in (_tensor(), [_tensor(), _tensor()]):
        bucket = Bucket(result, device, 1.0)
        with logged() as log:
            with hostdev.stream(side):
                bucket.resolve()
            child = bucket.future.then(lambda done: done.value())
            bucket.future.wait()
        assert _behind(log, current.stream_id, side.stream_id)
        (callback,) = {s for what, _, s in log if what == "wait"} - {current.stream_id}
        assert callback != side.stream_id and _behind(log, callback, side.stream_id)
        with logged() as log:
            child.wait()
        assert (log[0][0], log[0][2]) == ("wait", current.stream_id)
        tensors = result if isinstance(result, list) else [result]
        kept = {number for what, number, _ in log if what == "record_stream"}
        assert kept == {one.data_ptr() for one in tensors}


class _Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


@on_ranks(1, launcher="torchrun", environment=DEVICE)
def test_an_error_that_cannot_be_pickled() -> None:
    """A future of a device pickles its result, to find tensors."""
    bucket = Bucket(None, torch.device(*PLACE), 1.0)
    bucket.resolve(_Unpicklable("what happened"))
    for future in (bucket.future, bucket.future.then(lambda done: done.value())):
        with pytest.raises(Exception, match="what happened") as raised:
            future.wait()
        assert "_Unpicklable" in repr(raised.value)


@on_ranks(1, launcher="torchrun", environment=DEVICE)
def test_tensors_of_two_devices() -> None:
    """As on a GPU, an operator takes no tensors of the host with those of the device."""
    tensor = _tensor()
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        tensor + torch.zeros(3, dtype=torch.float32, device="cpu")
    number = torch.tensor(2.0, dtype=torch.float32, device="cpu")
    assert (tensor + number).tolist() == [2.0] * 3
