// The states of a run, and how each is coloured.

export const STATES = { running: "good", finished: "accent", stopped: "warn", failed: "bad" };
