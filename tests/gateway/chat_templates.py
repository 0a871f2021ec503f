"""Chat templates in the shape of the families' own, each with what sets it apart, in few words."""

from tests.rollout.test_demonstrations import CHATML, SMOLLM2

CALLS_JSON = (
    "{% for c in m.tool_calls %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
CALLS_XML = (
    "{% for c in m.tool_calls %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\n' }}"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}{{ '\n</parameter>\n' }}"
    "{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}"
)
# Results in a row share one user message.
RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
TOOLS = "{{ 'Tools:' }}{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}"
GENERATE = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

# Qwen2.5: a system message of its own; tools stand in it.
QWEN25 = (
    "{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}Qwen.{% endif %}"
    "{% if tools %}{{ '\n\n' }}" + TOOLS + "{% endif %}{{ '<|im_end|>\n' }}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) or "
    "(m.role == 'assistant' and not m.tool_calls) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% if not m.content %}{{ '\n' }}{% endif %}" + CALLS_JSON + "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}" + RESULTS + "{% endif %}{% endfor %}" + GENERATE
)
# Qwen3: thoughts are shown after the last question only, and the last message always has some.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}" + TOOLS + "{{ '<|im_end|>\n' }}{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% elif m.role == 'assistant' %}"
    "{% set thought = m.reasoning_content or '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{% else %}{{ content }}"
    "{% endif %}"
    + CALLS_JSON
    + "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    + RESULTS
    + "{% endif %}{% endfor %}"
    + GENERATE
)
# Qwen3 with enable_thinking false: the policy writes behind thoughts that are there, and empty.
QWEN3_QUIET = QWEN3.removesuffix(GENERATE) + GENERATE.replace(
    "assistant\n'", "assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking | default(false) is false else '')"
)
# Qwen3-Coder: tags instead of JSON; blanks of a text beside calls are trimmed.
QWEN3_CODER = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{% if tools or system %}{{ '<|im_start|>system\n' + (system or 'Coder.') }}"
    "{% if tools %}{{ '\n\n' }}" + TOOLS + "{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{{ '<|im_start|>assistant' }}"
    "{% if m.content | trim %}{{ '\n' + m.content | trim + '\n' }}{% endif %}" + CALLS_XML + "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif %}"
    "{{ '<tool_response>\n' + m.content + '\n</tool_response>\n' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + GENERATE
)
# Llama 3.1: trims, escapes results, tools in the first user message, one call in a message and no text beside it.
LLAMA31 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' + (system or '') + '<|eot_id|>' }}"
    "{% if tools is not none %}{{ '<|start_header_id|>user<|end_header_id|>\n\n' }}"
    "{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}{{ messages[0].content | trim }}<|eot_id|>"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}{% elif m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ {'output': m.content} | tojson }}<|eot_id|>{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Hermes: arguments before names, text beside calls dropped, a result must have a name and is escaped.
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n' }}" + TOOLS + "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls is defined %}{{ '<|im_start|>assistant' }}"
    "{% for c in m.tool_calls %}{{ '\n<tool_call>\n{\"arguments\": ' }}{{ c.function.arguments | tojson }}"
    "{{ ', \"name\": \"' + c.function.name + '\"}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{% if m.name is not defined %}{{ raise_exception('no name') }}{% endif %}"
    '{{ \'<|im_start|>tool\n<tool_response>\n{"name": "\' + m.name + \'", "content": \' }}{{ m.content | tojson }}'
    "{{ '}\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + GENERATE
)
# Qwen3.5: the policy begins within its thoughts, and a system message must be the first.
THINKER = QWEN3_CODER.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('system first') }}{% endif %}",
).replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
# Gemma: no system, no tools, users and assistants alternate.
STRICT = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('roles') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)

TEMPLATES = {  # source, the EOS that ends a message
    "chatml": (CHATML, "<|im_end|>"),
    "smollm2": (SMOLLM2, "<|im_end|>"),
    "qwen2.5": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "qwen3-quiet": (QWEN3_QUIET, "<|im_end|>"),
    "qwen3-coder": (QWEN3_CODER, "<|im_end|>"),
    "llama3.1": (LLAMA31, "<|eot_id|>"),
    "hermes": (HERMES, "<|im_end|>"),
    "thinker": (THINKER, "<|im_end|>"),
    "strict": (STRICT, "<|im_end|>"),
    "plain": ("", "<|endoftext|>"),
}
