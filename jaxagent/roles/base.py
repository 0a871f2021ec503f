"""What a role of your own that speaks text is made of, under the name that configs and pages know it by."""

from jaxagent.envs.cast import Reply as Reply
from jaxagent.envs.cast import Run as Run
from jaxagent.envs.cast import Speaker as Speaker
from jaxagent.envs.cast import TextRole as TextRole
