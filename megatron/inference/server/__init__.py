"""Text generation over HTTP. Needs fastapi and uvicorn; nothing else in the tree imports this.

body_fields.py       validation of request bodies: a table of fields with their limits
serving.py           what every route needs: engine, tokenizer, limits
request_handling.py  the engine requests of one HTTP call; cancelled when the client disconnects
put_api.py           PUT /api, as Megatron's text generation server answers it
openai.py            /v1/completions and /v1/chat/completions, whole or as server-sent events
chat.py              messages to ids, by the chat template
scoring.py           /pooling and /v1/score, of a reward model
metrics.py           /metrics, in Prometheus' text format
app.py               routes, authorization, adapters that clients load, and errors as responses
http_server.py       the server process: connections, start, signals, shutdown, ranks that die
page.html    the page at /
"""
