"""The application of one resources server of NeMo-Gym, as its own `run_webserver` makes it, without the other servers.

It runs in the server's own Python. RESOURCES_SERVER names the class, RESOURCES_CONFIG has its settings as JSON.
"""

import json
import os
import pkgutil

from nemo_gym.config_types import BaseServerConfig  # type: ignore[import-not-found]
from nemo_gym.server_utils import ServerClient  # type: ignore[import-not-found]
from omegaconf import OmegaConf  # type: ignore[import-not-found]

server_class = pkgutil.resolve_name(os.environ["RESOURCES_SERVER"])
own = {"name": server_class.__name__, "host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "domain": "other"}
config = server_class.model_fields["config"].annotation(**own, **json.loads(os.environ["RESOURCES_CONFIG"]))
client = ServerClient(
    head_server_config=BaseServerConfig(host="127.0.0.1", port=0), global_config_dict=OmegaConf.create()
)
server = server_class(config=config, server_client=client)
app = server.setup_webserver()
server.setup_liveness(app)
server.setup_exception_middleware(app)
