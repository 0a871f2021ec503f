"""What tests of pipelines that build images share."""

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest

from jaxagent.config import ConfigError
from jaxagent.sandbox import choose
from jaxagent.sandbox.owner import Owner


@pytest.fixture
def images():
    """A folder for built images; skips, with the reason, where no back end takes layers."""
    owner = Owner()
    try:
        backend = asyncio.run(choose.choose_backend(owner))
    except ConfigError as error:
        pytest.skip(str(error))
    finally:
        owner.close()
    if backend.name != "namespaces":
        pytest.skip(f"{backend.name} has no layers")
    folder = Path(tempfile.mkdtemp(prefix="jaxagent-test-images-"))  # pytest's own is closed to the sandboxes' user
    yield folder
    shutil.rmtree(folder)
