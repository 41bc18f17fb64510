"""Handles wait once and free what they hold; a moment is the device's, or on a CPU the host's."""

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minitron.comm.handle import DeviceTime, Handle


def test_a_handle_waits_and_finishes_once_in_order_and_frees_what_it_held():
    done, held = [], torch.zeros(1)
    freed = weakref.ref(held)
    waits = [lambda: done.append("first"), lambda: done.append("second")]
    handle = Handle(3, waits, lambda x: done.append("finish") or x + 1, held)
    later = handle.then(lambda x: done.append("then") or 10 * x)
    del held
    assert freed() is not None and not handle.done and not later.done and done == []
    assert later.wait() == later.wait() == 40 and handle.wait() == 4
    assert done == ["first", "second", "finish", "then"]
    assert handle.done and later.done and freed() is None


def test_a_result_that_needs_a_wait_or_a_finish_is_not_done():
    assert Handle(1).done and Handle(1).wait() == 1
    assert not Handle(1, [lambda: None]).done and not Handle(1, finish=str).done


def test_seconds_between_moments(monkeypatch):
    """Two events give milliseconds; if one of the moments has none, the host's clock counts."""
    clock = iter([10.0, 12.5, 13.0, 14.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    begin, end = DeviceTime(torch.device("cpu")), DeviceTime(torch.device("cpu"))
    assert end.seconds_since(begin) == 2.5
    waited = []

    def event(ms):
        own = SimpleNamespace(ms=ms, record=lambda: waited.append("recorded"), synchronize=lambda: waited.append(ms))
        own.elapsed_time = lambda later: later.ms - ms
        return own

    with mock.patch.object(torch.cuda, "Event", lambda enable_timing: event(500.0 if enable_timing else None)):
        begin, end = DeviceTime(torch.device("cuda")), DeviceTime(torch.device("cuda"), event(3000.0))
    assert end.seconds_since(begin) == pytest.approx(2.5) and waited == ["recorded", 3000.0]
    clock = iter([20.0, 21.0])
    on_host, waited[:] = DeviceTime(torch.device("cpu")), []
    with mock.patch.object(torch.cuda, "Event", lambda enable_timing: event(0.0)):
        on_gpu = DeviceTime(torch.device("cuda"))
    assert (on_gpu.seconds_since(on_host), on_host.seconds_since(on_gpu)) == (1.0, -1.0)
