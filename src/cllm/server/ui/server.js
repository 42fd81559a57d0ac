// The server's API: requests with the user's key, and errors that people can read.

const KEY = "cllm-api-key";
const UNREACHABLE = "The server cannot be reached. Check that it is running.";
const CUT_OFF = "The connection ended before the answer was complete.";

export class ServerError extends Error {
  /**
   * status is the HTTP status, 0 if there was no answer. retryAfter is in seconds, 0 if another try
   * would fail too. ticket claims the place in the queue that the server has reserved.
   */
  constructor(message, { status = 0, code = "", retryAfter = 0, ticket = "" } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter, ticket });
  }
}

let unstored = ""; // the key, if the browser's storage is blocked or full

export function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? unstored;
  } catch {
    return unstored;
  }
}

export function isKeyRemembered() {
  try {
    return localStorage.getItem(KEY) !== null;
  } catch {
    return false;
  }
}

/** Keep the API key until the tab is closed, or, with remembers, until the user removes it. */
export function keepKey(key, remembers) {
  unstored = "";
  try {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    if (key) (remembers ? localStorage : sessionStorage).setItem(KEY, key);
  } catch {
    unstored = key; // lost when the page is closed
  }
}

/**
 * GET a path, or POST a body to it, unless there is another method, and return the response. Throws
 * ServerError.
 */
export async function request(path, { method, body, signal, ticket } = {}) {
  const headers = {};
  const key = readKey();
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  if (ticket) headers["x-cllm-retry-ticket"] = ticket;
  const options = { method: method ?? (body ? "POST" : "GET"), headers, signal };
  if (body) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw signal?.aborted ? error : new ServerError(UNREACHABLE);
  }
  if (!response.ok) throw await readError(response);
  return response;
}

async function readError(response) {
  const fault = (await response.json().catch(() => ({}))).error ?? {};
  const { status, headers } = response;
  const mayRetry = [429, 503].includes(status) && headers.get("x-should-retry") !== "false";
  const text = typeof fault === "string" ? fault : fault.message;
  return new ServerError(text || `The server answered ${status} ${response.statusText}.`, {
    status,
    code: fault.code ?? "",
    retryAfter: mayRetry ? Number(headers.get("retry-after")) : 0,
    ticket: headers.get("x-cllm-retry-ticket") ?? "",
  });
}

/** GET a path, or POST a body to it, and return the JSON of the answer. Throws ServerError. */
export async function getJson(path, body) {
  const response = await request(path, { body });
  return response.json();
}

export async function listModels() {
  return (await getJson("v1/models")).data;
}

/** Yield the events about models: the status of each one, then its changes. Throws ServerError. */
export async function* listenToModels(signal) {
  const response = await request("models/sse", { signal });
  for await (const data of readEvents(response, signal)) yield JSON.parse(data);
}

/**
 * Start a streamed chat completion or, if the body has a prompt, the continuation of a text. Return
 * the queue position (0: it does not wait), the estimated seconds to the first token, and the
 * chunks. Throws ServerError, also while the chunks are read.
 */
export async function streamAnswer(body, signal, ticket) {
  const path = "prompt" in body ? "v1/completions" : "v1/chat/completions";
  const response = await request(path, { body, signal, ticket });
  return {
    position: Number(response.headers.get("x-cllm-queue-position")),
    seconds: Number(response.headers.get("x-cllm-estimated-ttft-ms")) / 1000,
    chunks: readChunks(response, signal),
  };
}

/** End the reasoning of an answer, so that its text begins. Throws ServerError. */
export async function endReasoning(id) {
  const body = { id, action: "reasoning_end" };
  const { success, message } = await getJson("v1/chat/completions/control", body);
  if (!success) throw new ServerError(`The reasoning cannot be ended: ${message}.`);
}

async function* readChunks(response, signal) {
  for await (const data of readEvents(response, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new ServerError(chunk.error.message, { code: chunk.error.code ?? "" });
    }
    yield chunk;
  }
  throw new ServerError(CUT_OFF);
}

/** Yield the data of server-sent events, which the server writes as one line each. */
export async function* readEvents(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw signal?.aborted ? error : new ServerError(CUT_OFF);
    }
    if (part.done) return;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
