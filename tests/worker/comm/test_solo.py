"""The communicator of one rank, without the native extension."""

from __future__ import annotations

import numpy as np
import pytest

from dynamictp.errors import CommunicatorBroken
from dynamictp.worker.comm.base import Communicator
from dynamictp.worker.comm.control import ControlState, PlainControlBlock, bytes_needed
from dynamictp.worker.comm.solo import SoloCommunicator
from tests.worker.comm.comm_harness import shared_memory


def test_operations_leave_the_only_rank_alone() -> None:
    end: Communicator = SoloCommunicator()
    own = np.arange(6, dtype=np.float32)
    assert end.state == "new"
    end.barrier()
    end.all_reduce(own)
    end.broadcast(own, 0)
    assert np.array_equal(own, np.arange(6))
    assert end.all_gather(own).tobytes() == own.tobytes()
    assert end.state == "ready"
    with pytest.raises(ValueError, match="root"):
        end.broadcast(own, 1)


def test_it_obeys_the_control_word() -> None:
    control = PlainControlBlock(shared_memory(bytes_needed(1, 1)), 1, 1)
    control.set_control(0, 4, ControlState.LIVE)
    end = SoloCommunicator(control=control, slot=0, epoch=4)
    end.barrier()
    control.set_control(0, 5, ControlState.LIVE)
    end.reset(5)
    assert end.state == "new"
    end.barrier()
    control.set_control(0, 5, ControlState.ABORTED)
    with pytest.raises(CommunicatorBroken, match="epoch 5"):
        end.barrier()
    assert end.state == "broken"
    with pytest.raises(CommunicatorBroken):
        end.reset(6)


def test_abort_and_close_are_final() -> None:
    control = PlainControlBlock(shared_memory(bytes_needed(1, 1)), 1, 1)
    control.set_control(0, 4, ControlState.LIVE)
    end = SoloCommunicator(control=control, slot=0, epoch=4)
    end.abort()
    assert control.control(0) == (4, ControlState.ABORTED)
    with pytest.raises(CommunicatorBroken, match="broken"):
        end.barrier()
    end.close()
    assert end.state == "closed"
    with pytest.raises(CommunicatorBroken, match="closed"):
        end.barrier()
