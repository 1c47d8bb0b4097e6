"""Inference: continuous batching with a paged KV cache, on the pipeline stages that training uses.

requests.py                GenerationRequest, GenerationReply, GenerationEvent: what is asked, and what is answered
sampling.py                the next token from logits, by a random number of the request's own
detokenizer.py             incremental detokenization; stop words
block_allocator.py         block tables of the paged KV cache, prefix caching; no tensors
cache.py                   the paged KV cache, and attention over it with any kernel
cuda_graphs.py             captured decoding steps
model_runner.py            one forward pass of all ranks over new tokens of many sequences
forward_passes.py          microbatches through the pipeline stages
sequence.py                the state of one request
speculative.py             speculative decoding: a draft network, or multi-token prediction
engine.py                  the scheduler: which requests take part in each step
expert_choice_recorder.py  which experts the tokens of a pass used
liveness.py                which ranks are alive
service.py                 an engine in a thread of its own, for servers
service_thread.py          that thread, which a reward model has too
beam.py                    beam search over an engine
generate.py                text in, text out
encoder_decoder.py         the same requests for a T5, one batch after the other

    engine = Engine(load_network(folder, GPT).stages, tokenizer)
    (reply,) = engine.run([GenerationRequest(tuple(tokenizer.tokenize("Once upon")), num_tokens=20)])
"""
