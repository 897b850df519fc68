#!/usr/bin/env bash
# Calls of curl.
set -u

call() {
    local name=$1 part=$2
    shift 2
    local answer
    answer=$(curl --silent --show-error --max-time 120 -H "Authorization: Bearer $POORWILL_KEY" "$@" 2>&1)
    if [[ $answer == *"$part"* ]]; then
        echo "ok $name"
    else
        echo "failed $name: ${answer//$'\n'/ }"
    fi
}

json=(-H "Content-Type: application/json")
chat='{"model": "amber", "max_tokens": 8, "messages": [{"role": "user", "content": "Tell me of trees."}]'
call models '"amber"' "$POORWILL_BASE/v1/models"
call chat '"content"' "${json[@]}" -d "$chat}" "$POORWILL_BASE/v1/chat/completions"
call stream '[DONE]' "${json[@]}" --no-buffer -d "$chat, \"stream\": true}" "$POORWILL_BASE/v1/chat/completions"
call "HTTP/1.0" '"content"' "${json[@]}" --http1.0 -d "$chat}" "$POORWILL_BASE/v1/chat/completions"
call "asks for HTTP/2" '"content"' "${json[@]}" --http2 -d "$chat}" "$POORWILL_BASE/v1/chat/completions"
call "unknown path" unknown_path "$POORWILL_BASE/sleep"
