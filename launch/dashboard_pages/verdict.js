// What an episode's record says of why it ended as it did, in sentences.

import { count, known, num, signed } from "./dom.js";

const ENDINGS = {
  completed: "the environment ended it",
  max_turns: "it ran out of turns",
  out_of_tokens: "the model ran out of tokens",
  context_full: "the next turn did not fit into the context",
  aborted: "the engine aborted it",
  engine_error: "the engine failed",
  env_error: "the environment failed",
  env_timeout: "the environment took too long",
  agent_gone: "no agent took the episode, or its agent let the lease run out",
  reward_error: "the reward function failed",
  reward_timeout: "the reward function took too long",
  wire_error: "it broke the contract of the wire",
};
const GOOD = ["completed"];
const LIMITS = ["max_turns", "out_of_tokens", "context_full"];
export const endingKind = (ending) => (GOOD.includes(ending) ? "good" : LIMITS.includes(ending) ? "warn" : "bad");

const listed = (numbers) => {
  const parts = [];
  for (const n of numbers) {
    const last = parts[parts.length - 1];
    if (last && last[1] === n - 1) last[1] = n;
    else parts.push([n, n]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`)).join(", ");
};
const turnsSaid = (numbers) => `${numbers.length === 1 ? "turn" : "turns"} ${listed(numbers)}`;

export const valueBefore = (data, turn) => data.tokens.value?.[turn.start] ?? null;

export function advantageOf(data, turn) {
  const values = (data.tokens.advantage || []).slice(turn.start, turn.end).filter(known);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

// [name, value] of all that an environment's answer holds, however deep.
export function leaves(said, name = "") {
  if (typeof said !== "object" || said === null || Array.isArray(said)) return [[name, said]];
  return Object.entries(said).flatMap(([key, value]) => leaves(value, key));
}

// Names of what the environment denied in some turns and not in others, with these turns.
export function denied(turns) {
  const found = new Map();
  turns.forEach((turn, i) => {
    for (const [name, value] of leaves(turn.info))
      if (typeof value === "boolean") found.set(name, [...(found.get(name) || []), [i + 1, value]]);
  });
  return [...found]
    .map(([name, all]) => [name, all.filter(([, value]) => !value).map(([i]) => i), all.length])
    .filter(([, at, all]) => at.length && at.length < all);
}

// {kind, headline, reasons}: the reasons are sentences about turns, counted from 1.
export function verdict(data) {
  const s = data.summary;
  const turns = data.turns;
  const reasons = [];
  const won = s.success > 0;
  const fault = data.header.evaluation ? "Ended by a fault" : "Not trained on";
  const outcome = won ? "Success" : s.has_failed ? fault : "No success";
  const ending = `${ENDINGS[s.ending] || s.ending} (${count(turns.length, "turn")}, reward ${signed(s.reward)})`;
  const headline = `${outcome}: ${ending}.`;
  if (s.refused) reasons.push(`Its group was refused: ${s.refused}.`);
  const others = data.group.filter((e) => e.id !== s.id);
  if (others.length) {
    const successes = others.filter((e) => e.success > 0).length;
    const mean = others.reduce((a, e) => a + e.reward, 0) / others.length;
    const rest = count(others.length, "other");
    reasons.push(`Of the ${rest} of its group, ${successes} succeeded; their mean reward is ${num(mean)}.`);
  }
  const shown = turns.map((t) =>
    data.images
      .slice(t.first_image, t.last_image)
      .map((i) => i.hash)
      .join(),
  );
  const still = turns.flatMap((t, i) => (i && shown[i] && shown[i] === shown[i - 1] ? [i] : []));
  if (still.length)
    reasons.push(`The picture did not change after ${turnsSaid(still)}: what was answered changed nothing in the end.`);
  const seenBefore = turns.flatMap((t, i) =>
    shown[i] && shown[i] !== shown[i - 1] && shown.indexOf(shown[i]) < i ? [i + 1] : [],
  );
  if (seenBefore.length) reasons.push(`Before ${turnsSaid(seenBefore)} it was back at a picture that it had seen.`);
  const same = turns.flatMap((t, i) =>
    i && t.answer.trim() && t.answer.trim() === turns[i - 1].answer.trim() ? [i + 1] : [],
  );
  if (same.length && turns.length > 2) reasons.push(`It answered as in the turn before in ${turnsSaid(same)}.`);
  for (const [name, at] of denied(turns).slice(0, 4))
    reasons.push(`The environment said no to “${name}” in ${turnsSaid(at)}.`);
  const worst = turns.reduce((w, t, i) => (t.reward < (turns[w]?.reward ?? 0) ? i : w), -1);
  if (worst >= 0 && turns.length > 1) reasons.push(`Turn ${worst + 1} earned least: ${signed(turns[worst].reward)}.`);
  const values = turns.map((t) => valueBefore(data, t));
  let fall = 0;
  let at = 0;
  for (let i = 1; i < values.length; i += 1)
    if (known(values[i]) && known(values[i - 1]) && values[i - 1] - values[i] > fall) {
      fall = values[i - 1] - values[i];
      at = i;
    }
  const scale = Math.max(...values.filter(known), 0) - Math.min(...values.filter(known), 0);
  if (at && fall > 0.3 * scale && !won)
    reasons.push(`The critic's value fell most with turn ${at}: from ${num(values[at - 1])} to ${num(values[at])}.`);
  return { kind: won ? "good" : "bad", headline, reasons, error: data.error };
}
