"""The one model definition: trainer, frozen reference, critic and generation engine all run this code.

`spec` says what the model is, `params` what each array is (shape, axes, init, Hugging Face name), `sharding` where it
lives, `transformer` + `attention` + `logprobs` are the maths, `families` + `hf` the door to Hugging Face folders.
Everything is a pure function over `flax.struct` trees. Imports only `jaxagent.types` and `jaxagent.config`.
"""
