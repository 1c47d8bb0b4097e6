"""Tasks with a reward. `base.Environment` is what one's own task derives from; `config.py` reads --langrl-env-config.

arithmetic.py     sums and products of small numbers
countdown.py      a target from given numbers
math_problems.py  problems of mathematics, judged by their final answer
reward_model.py   answers that a reward model scores
openai_agent.py   an agent that speaks to the policy as to an OpenAI-compatible server
remote.py         an environment behind HTTP
threads.py        functions that may take long, beside the loop that generates
"""
