"""The engine: vLLM and the torch trainer of one (architecture, configuration), and the process that holds them.

`port` names what an engine does; `vllm_torch` does it, `fake` is its test double; `child` is the process around
either, `client` the daemon's end of it. Only `client`, `codec`, `errors` and `port` may be imported by the daemon:
the others pull in torch and vLLM.
"""
