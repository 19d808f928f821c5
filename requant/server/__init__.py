"""`requant serve`: a model behind OpenAI's HTTP interface, for one machine and a few people.

    request -> protocol (checked, in tokens)  -> engine (a queue, one worker, one model)  -> text_stream -> JSON or events

`transformers serve` has the same routes from 5.x on, but it loads whichever model a request names, has no key and no
limits, and cannot read these checkpoints unless requant is imported first; so this is our own, small. For many people at
once, serve with vLLM (`requant.integrations.vllm`).
"""
