from __future__ import annotations

from pathlib import Path

import pytest
from tiny_training import write_documents


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small Python files."""
    return write_documents(tmp_path_factory.mktemp("documents"))
