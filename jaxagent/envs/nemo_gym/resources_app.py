"""The application of one resources server of NeMo-Gym, as its own `run_webserver` makes it, without the other servers.

It is made in the server's own Python. RESOURCES_SERVER names the class, RESOURCES_CONFIG has its settings as JSON.
"""

import json
import os
import pkgutil
from typing import Any


def application() -> Any:
    """The application, with a session for each client's cookie."""
    from nemo_gym.config_types import BaseServerConfig  # type: ignore[import-not-found]
    from nemo_gym.server_utils import ServerClient  # type: ignore[import-not-found]
    from omegaconf import OmegaConf  # type: ignore[import-not-found]

    made: Any = pkgutil.resolve_name(os.environ["RESOURCES_SERVER"])
    own = {"name": made.__name__, "host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "domain": "other"}
    config = made.model_fields["config"].annotation(**{**own, **json.loads(os.environ["RESOURCES_CONFIG"])})
    head = BaseServerConfig(host="127.0.0.1", port=0)
    server = made(
        config=config, server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create())
    )
    app = server.setup_webserver()
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    return app
