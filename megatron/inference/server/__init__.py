"""Text generation over HTTP. Needs fastapi and uvicorn; nothing else in the tree imports this.

fields.py    what a body may hold: a table of fields with their limits
serving.py   what every route needs: the engine, the words, the limits
asking.py    requests of one HTTP call on their way through the engine, and the client who may leave
put_api.py   PUT /api, as Megatron's text generation server answers it
openai.py    /v1/completions and /v1/chat/completions, whole or as server-sent events
chat.py      messages to ids, by the chat template
metrics.py   /metrics, in Prometheus' text format
app.py       the routes, who may use them, and errors as answers
run.py       the process: from the first request to the last, signals, and ranks that die
page.html    the page at /
"""
