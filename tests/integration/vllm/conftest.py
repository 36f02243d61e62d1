"""Engine processes that the tests of this folder share."""

from collections.abc import Iterator

import pytest
from vllm_engine import EngineProcess


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("engine") / "log")
    yield process
    process.close()


@pytest.fixture(scope="session")
def parallel_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """For two ranks on two cores. One thread in the process itself, so that ranks can be forks of it."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    process = EngineProcess(tmp_path_factory.mktemp("engine") / "log", environment)
    yield process
    process.close()
