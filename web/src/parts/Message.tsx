import { useState } from "preact/hooks";

import { count } from "../format";
import type { Json, JsonObject } from "../wire";

const LIMIT = 4000;

/** A text of any length; the rest of a long one on request. */
export function LongText({ text, mono = false }: { text: string; mono?: boolean }) {
  const [all, setAll] = useState(false);
  const cut = !all && text.length > LIMIT;
  const shown = cut ? text.slice(0, LIMIT) : text;
  return (
    <>
      {mono ? (
        <pre tabIndex={0}>{shown}</pre>
      ) : (
        <div class="text">{shown}</div>
      )}
      {cut && (
        <button class="more" type="button" onClick={() => setAll(true)}>
          show {count(text.length - LIMIT)} more characters
        </button>
      )}
    </>
  );
}

/** Any JSON value: a text as text, all else indented. */
export function Value({ value }: { value: Json }) {
  if (value === null) return <span class="soft">none</span>;
  if (typeof value === "string") return <LongText text={value} />;
  if (typeof value === "number" || typeof value === "boolean") return <span class="mono">{String(value)}</span>;
  return <LongText text={JSON.stringify(value, null, 2)} mono />;
}

/** The text of a message's content, which is a string or a list of parts. */
export function contentText(content: Json | undefined): string {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) {
    return (content as readonly Json[])
      .map((part) => {
        if (typeof part === "string") return part;
        if (isObject(part) && typeof part["text"] === "string") return part["text"];
        return JSON.stringify(part);
      })
      .join("\n");
  }
  return JSON.stringify(content, null, 2);
}

function isObject(value: Json | undefined): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

interface ToolCall {
  name: string;
  given: string;
}

export function toolCalls(message: JsonObject): ToolCall[] {
  const listed = message["tool_calls"];
  if (!Array.isArray(listed)) return [];
  return (listed as readonly Json[]).filter(isObject).map((call) => {
    const described = isObject(call["function"]) ? call["function"] : call;
    const given = described["arguments"] ?? described["input"] ?? null;
    return { name: typeof described["name"] === "string" ? described["name"] : "tool", given: typeof given === "string" ? pretty(given) : JSON.stringify(given, null, 2) };
  });
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // A model may write anything here.
  }
}

/** One message of a conversation with its tool calls. */
export function Message({ message, note = "" }: { message: JsonObject; note?: string }) {
  const role = typeof message["role"] === "string" ? message["role"] : "message";
  const text = contentText(message["content"]);
  const reasoning = contentText(message["reasoning_content"] ?? message["reasoning"]);
  const calls = toolCalls(message);
  const known = ["user", "assistant", "tool", "system"].includes(role) ? role : "other";
  const name = typeof message["name"] === "string" ? message["name"] : "";
  return (
    <div class={`msg ${known}`}>
      <div class="who">
        <span>{name ? `${role}, ${name}` : role}</span>
        {note && <span>{note}</span>}
      </div>
      {reasoning && (
        <details>
          <summary>reasoning, {count(reasoning.length)} characters</summary>
          <LongText text={reasoning} />
        </details>
      )}
      {text && (known === "tool" ? <LongText text={text} mono /> : <LongText text={text} />)}
      {calls.map((call, index) => (
        <details key={index} open={call.given.length < 400}>
          <summary>
            calls <code>{call.name}</code>
          </summary>
          <LongText text={call.given} mono />
        </details>
      ))}
      {!text && !reasoning && calls.length === 0 && <span class="soft">an empty message</span>}
    </div>
  );
}
