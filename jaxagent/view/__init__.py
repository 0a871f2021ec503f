"""A page that shows runs while they train and after: `python -m jaxagent.view runs/`."""
