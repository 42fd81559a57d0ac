// The sampling parameters of the server (cllm/core/params.py), as numbers that the user can set.

/**
 * min and max are the server's bounds, isWhole means an integer, and hint says what the values do.
 * The first ones are shown at once, those with isRare on demand.
 */
export const PARAMETERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, hint: "0 takes the most probable token; higher values vary more." },
  { name: "top_p", label: "Top P", min: 0, max: 1, hint: "Keeps the most probable tokens up to this total probability; 1 is off." },
  { name: "top_k", label: "Top K", min: 0, isWhole: true, hint: "Keeps this many of the most probable tokens; 0 is off." },
  { name: "min_p", label: "Min P", min: 0, max: 1, hint: "Drops tokens with less than this share of the best one's probability; 0 is off." },
  { name: "max_tokens", label: "Max tokens", min: 1, isWhole: true, hint: "The longest answer; without it, up to the end of the context." },
  { name: "seed", label: "Seed", isWhole: true, hint: "The same seed draws the same random numbers; -1 draws others each time." },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, isRare: true, hint: "Makes tokens of the prompt and the answer less probable; 1 is off." },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, isRare: true, hint: "Subtracted from the logits of tokens that the answer has." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, isRare: true, hint: "The same, once for each time the answer has the token." },
  { name: "typical_p", label: "Typical P", min: 0, max: 1, isRare: true, hint: "Keeps tokens whose surprise is nearest to the expected one; 1 is off." },
  { name: "top_n_sigma", label: "Top n sigma", min: -1, max: 100, isRare: true, hint: "Keeps logits within this many standard deviations of the largest; 0 is off." },
  { name: "xtc_probability", label: "XTC probability", min: 0, max: 1, isRare: true, hint: "How often XTC removes the most probable tokens; 0 is off." },
  { name: "xtc_threshold", label: "XTC threshold", min: 0, max: 1, isRare: true, hint: "The probability from which XTC removes tokens." },
  { name: "mirostat", label: "Mirostat", min: 0, max: 2, step: 2, isWhole: true, isRare: true, hint: "2 keeps the text's surprise near mirostat tau; 0 is off." },
  { name: "mirostat_tau", label: "Mirostat tau", min: 0, max: 100, isRare: true, hint: "The surprise, in bits, that mirostat aims at." },
  { name: "mirostat_eta", label: "Mirostat eta", min: 0, max: 1, isRare: true, hint: "How fast mirostat approaches tau." },
  { name: "dry_multiplier", label: "DRY multiplier", min: 0, max: 100, isRare: true, hint: "Weight of DRY's penalty for repetitions; 0 is off." },
  { name: "dry_base", label: "DRY base", min: 0, max: 100, isRare: true, hint: "How DRY's penalty grows with each repeated token." },
  { name: "dry_allowed_length", label: "DRY allowed length", min: 1, isWhole: true, isRare: true, hint: "The length of a repetition from which DRY applies." },
  { name: "dry_penalty_last_n", label: "DRY last n", min: -1, isWhole: true, isRare: true, hint: "How many of the last tokens DRY searches; -1 means all." },
  { name: "min_tokens", label: "Min tokens", min: 0, isWhole: true, isRare: true, hint: "The answer cannot end before it has this many tokens." },
];

/** Switches of the server. */
export const SWITCHES = [
  { name: "ignore_eos", label: "Do not end at an end token" },
  { name: "include_stop_str_in_output", label: "Keep the stop sequence in the answer" },
];

/** Return the values that are set, as numbers. Throws an Error that names the wrong one. */
export function readParameters(settings) {
  const fields = {};
  for (const { name, label, isWhole } of PARAMETERS) {
    if (!settings[name]) continue;
    fields[name] = Number(settings[name]);
    const isRight = isWhole ? Number.isInteger : Number.isFinite;
    if (!isRight(fields[name])) throw new Error(`${label} is not a valid number.`);
  }
  for (const { name } of SWITCHES) if (settings[name]) fields[name] = true;
  return fields;
}
