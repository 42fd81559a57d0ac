// Numbers and times in words.

export const milliseconds = (ms) => {
  if (ms === undefined || ms === null) return "–";
  return ms < 9999.5 ? `${Number(ms.toPrecision(3))} ms` : `${(ms / 1000).toFixed(1)} s`;
};

export const number = (value) =>
  value === null || value === undefined
    ? ""
    : value.toLocaleString("en", { maximumFractionDigits: 2 });

export const time = (created) => new Date(1000 * created).toLocaleString();

/** Return what tells a report from others. */
export const title = ({ head, created }) =>
  head ? head.note || `${head.settings.workload ?? "load"} on ${head.model}` : time(created);
