import pytest
import torch

from fsdp_ema_lib.lab.threads import cpu_threads


def test_the_number_of_threads_is_put_back_also_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), cpu_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        raise KeyError
    assert torch.get_num_threads() == before


def test_no_thread_at_all_is_refused():
    with pytest.raises(ValueError, match="count must be at least 1 thread, got 0"), cpu_threads(0):
        pytest.fail("the block must not run")
