"""The real Hub client of this process, pointed at a server on localhost: settings are changed, none of its code."""

from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.hf_api
import pytest
import transformers.utils.hub
from hub_server import HubServer
from huggingface_hub import constants


@contextmanager
def hub_on_localhost(folder: Path, token: str | None = "hf_alice"):
    """
    A [`HubServer`] that the client talks to, with a cache in `folder` (`pathlib.Path`), as the user of `token`.

    These settings are read from the environment when the client is imported, which was long ago.
    """
    with HubServer() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.endpoint)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Its uploads go to servers of their own; the Hub takes large files by LFS as well.
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        # These hold the endpoint of their first use.
        patch.setattr(transformers.utils.hub, "_hf_api", None)
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.endpoint)
        if token is None:
            patch.delenv("HF_TOKEN", raising=False)
        else:
            patch.setenv("HF_TOKEN", token)
        yield hub
