"""Inference: continuous batching with a paged KV cache, on the pipeline stages that training uses.

requests.py                GenerationRequest, GenerationReply, GenerationEvent: what is asked, and what is answered
sampling.py                the next token from logits, by a random number of the request's own
detokenizer.py             incremental detokenization; stop words
block_allocator.py         block tables of the paged KV cache, prefix caching; no tensors
cache.py                   the paged KV cache, and attention over it with any kernel
cuda_graphs.py             captured decoding steps
model_runner.py            one forward pass of all ranks over new tokens of many sequences
forward_passes.py          microbatches through the pipeline stages
step_input.py              what one forward pass is given and returns
sampled_tokens.py          the next tokens of a pass: sampled, scored, copied to the host
recurrent_states.py        states of layers that keep one instead of keys and values
sequence.py                the state of one request
speculative.py             speculative decoding: a draft network, or multi-token prediction
engine.py                  the scheduler: which requests take part in each step
engine_setup.py            what an engine is made with: checks, the size of its cache, its kernel
served_adapters.py         the adapters that requests may name
expert_choice_recorder.py  which experts the tokens of a pass used
liveness.py                which ranks are alive
service.py                 an engine in a thread of its own, for servers
service_thread.py          that thread, which a reward model has too
score_service.py           texts that wait for a score, scored together
answer_file.py             a file of answers while it grows: which of its lines answer the input
beam.py                    beam search over an engine
generate.py                text in, text out
image_prompts.py           prompts with images
eval_generate.py           what a network in training says after some prompts
encoder_decoder.py         the same requests for a T5, one batch after the other

    engine = Engine(load_network(folder, GPT).stages, tokenizer)
    (reply,) = engine.run([GenerationRequest(tuple(tokenizer.tokenize("Once upon")), num_tokens=20)])
"""
