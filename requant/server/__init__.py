"""`requant serve`: a model behind OpenAI's HTTP API, for one machine and a few users.

    request -> protocol (checked, in tokens)  -> engine (a queue, one worker, one model)  -> text_stream -> JSON or events

`transformers serve` has the same routes from 5.x on, but it loads whichever model a request names, has no key and no
limits, and cannot read these checkpoints unless requant is imported first; hence this small server. For many concurrent
requests, serve with vLLM (`requant.integrations.vllm`).
"""
