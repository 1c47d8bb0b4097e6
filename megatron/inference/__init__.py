"""Floor 6: decoding. Requests in, tokens out, on the stages that training uses.

requests.py     Request, Reply, Event: what is asked, and what is answered
sampling.py     the next token from logits, by a random number of the request's own
text.py         new ids as text while they come; stop words
blocks.py       which block of the cache holds what: tables, sharing, no tensors
cache.py        keys and values in blocks, and any attention kernel over them
crew.py         one forward pass of all ranks over new tokens of many texts
running.py      one request on its way
speculative.py  guesses of a draft, or of the network's own layers
engine.py       which requests go into each step, and what becomes of them
ranks.py        which ranks are there, and which one is lost
service.py      an engine in a thread, for servers
beam.py         beam search over an engine
generate.py     text in, text out
encoder_decoder.py  the same questions to a T5, a batch after the other

    engine = Engine(load_network(folder, GPT).stages, tokenizer)
    (reply,) = engine.run([Request(tuple(tokenizer.tokenize("Once upon")), num_tokens=20)])
"""
