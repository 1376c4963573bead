"""Chat templates in the manner of well-known families, shortened."""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and tools %}{%- continue %}{%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

STRICT = """\
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + ' ' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}"""

TEXT_ARGUMENTS = """\
{%- for message in messages %}
    {%- for call in message.get('tool_calls', []) %}
        {{- 'CALL ' + call['function']['name'] + ' ' + call['function']['arguments'] + '\\n' }}
    {%- endfor %}
    {{- message['role'] + ': ' + message['content'] + '\\n' }}
{%- endfor %}"""

SHORT_IDS = """\
{%- for message in messages %}
    {%- for call in message.tool_calls or [] %}
        {%- if call.id is not defined or call.id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- call.id + ':' + call.function | tojson + '\\n' }}
    {%- endfor %}
    {%- if message.role == 'tool' %}{{- message.tool_call_id + '=' }}{%- endif %}
    {{- message.content + '\\n' }}
{%- endfor %}"""
