#!/bin/sh
# An agent made of curl and jq: it answers, is asked to check, and replies with the number alone.
# The question comes on stdin, the answer goes to stdout.
set -eu

ask() { # read a conversation from stdin, write it to stdout with the model's answer appended
  conversation=$(cat)
  reply=$(printf '%s' "$conversation" |
    jq --arg model "$OPENAI_MODEL" '{model: $model, messages: ., max_tokens: 128}' |
    curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
      -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" -d @-) ||
    { printf '%s\n' "$reply" >&2; return 1; }
  printf '%s' "$conversation" | jq --argjson reply "$reply" '. + [$reply.choices[0].message | {role, content}]'
}

# No pipe between two calls: a shell notices only a failure at the end of a pipe.
asked=$(jq -Rs '[{role: "system", content: "Prices: apple 3, pear 4, plum 2."}, {role: "user", content: .}]')
answered=$(printf '%s' "$asked" | ask)
doubted=$(printf '%s' "$answered" | jq '. + [{role: "user", content: "Check that. Reply with the number only."}]')
checked=$(printf '%s' "$doubted" | ask)
printf '%s' "$checked" | jq -j '.[-1].content'
