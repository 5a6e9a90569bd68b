// What runs cost where the sliders stand: the clock is the largest of planes, see vsim.network.planes.

/** Whether a network or compute was given, to the page or by a slider; without both there are no hours. */
const isGiven = (what) => state.on === "1" || !P.assumed.includes(what);
const isPriced = () => isGiven("network") && isGiven("compute");
const place = () => ({ bw: isGiven("network") ? state.bw : NaN, lat: isGiven("network") ? state.lat : NaN, sec: isGiven("compute") ? state.sec : NaN, size: state.size });
const unpriced = () => `No ${["network", "compute"].filter((what) => !isGiven(what)).join(" and no ")} given: move the sliders to price the runs.`;
const factors = (ledger, at) => {
  if (ledger.decided === "both") return [ledger.seconds, 0, 0];
  return [ledger.decided ? ledger.seconds : at.sec, at.lat, at.size / at.bw];
};
const highest = (planes, [a, b, d]) => {
  let most = planes[0] === null ? NaN : 0; // null: a log without events

  for (let i = 0; i < planes.length; i += 3) most = Math.max(most, planes[i] * a + planes[i + 1] * b + planes[i + 2] * d);
  return most;
};
/** The position of a step between two of a ledger's steps: [place of the first, share of the second]. */
const between = (steps, step) => {
  let low = 0, high = steps.length - 1;
  if (step >= steps[high]) return [high, 0];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return [low, (step - steps[low]) / (steps[low + 1] - steps[low])];
};
const mixed = (values, [i, share]) => (share ? (1 - share) * values[i] + share * values[i + 1] : values[i]);
const timeAt = (ledger, [i, share], own) => {
  const first = highest(ledger.planes[i], own);
  return share ? (1 - share) * first + share * highest(ledger.planes[i + 1], own) : first;
};
const secondsAt = (seed, step, at = place()) => {
  const ledger = P.ledgers[seed.ledger];
  return timeAt(ledger, between(ledger.steps, step), factors(ledger, at));
};
const bytesAt = (seed, step, way) => {
  const ledger = P.ledgers[seed.ledger];
  return state.size * mixed(ledger[way], between(ledger.steps, step));
};
const lastStep = (seed) => P.ledgers[seed.ledger].steps[P.ledgers[seed.ledger].steps.length - 1];
const sound = (run) => run.seeds.filter((seed) => seed.sound);
/** The seeds by which runs are compared: all seeds of a run that can be the best, otherwise its sound seeds. */
const compared = (run) => run.compared.map((i) => run.seeds[i]);

/** The step of measurement i of the loss, and the cost of its result; see `vsim.analysis.spent`. */
const stepOf = (seed, i) => seed.curves[P.loss][0][i];
const forming = (seed, i) => (seed.formed.length && !seed.formed[i] ? seed.forming : null);
const formingTime = (own, at) => (own ? highest(own.planes, [0, at.lat, at.size / at.bw]) : 0);
const wireOf = (seed, i) => {
  const own = forming(seed, i);
  return bytesAt(seed, stepOf(seed, i), "wire") + (own ? state.size * own.wire : 0);
};
const secondsOf = (seed, i, at = place()) => secondsAt(seed, stepOf(seed, i), at) + formingTime(forming(seed, i), at);

/** As `vsim.history.reached.crossing`: the first measurement that reaches a loss, of any and of a formed model. */
const crossing = (seed, target) => {
  const [steps, losses] = seed.curves[P.loss] || [[], []], low = (loss) => loss !== null && loss <= target;
  const i = losses.findIndex(low), formed = losses.findIndex((loss, k) => low(loss) && !forming(seed, k));
  if (i < 0) return null;
  return { step: steps[i], first: i ? steps[i - 1] + 1 : steps[0], results: formed < 0 || formed === i ? [i] : [i, formed] };
};
const begun = (run) => run.seeds.filter((seed) => seed.begun);
const crossings = (run) => begun(run).map((seed) => crossing(seed, state.target));
/** Text about a run if some of its seeds do not reach the target; "" if all do. */
const never = (found) => {
  const reach = found.filter(Boolean).length;
  return reach === found.length ? "" : reach ? `${reach} of ${found.length} runs` : "never";
};

/** The costs of a run on the sliders' network: column → [mean, standard deviation], or text. */
const priced = (run) => {
  const whole = (seed) => {
    const ledger = P.ledgers[seed.ledger], total = secondsAt(seed, lastStep(seed)), own = factors(ledger, place());
    return { hours: total / 3600, utilization: total === 0 ? 1 : (ledger.computed * own[0]) / total,
             dollars: (state.price || 0) * ledger.nodes * total / 3600, wire: bytesAt(seed, lastStep(seed), "wire") / 1e6 };
  };
  const rows = sound(run).map(whole), results = compared(run).map((seed) => { // of the last loss
    const own = whole(seed), more = forming(seed, seed.formed.length - 1), hours = own.hours + formingTime(more, place()) / 3600;
    return { hours, dollars: own.hours ? (own.dollars * hours) / own.hours : 0, wire: own.wire + (more ? (state.size * more.wire) / 1e6 : 0) };
  });
  const found = {};
  for (const key of ["hours", "utilization", "dollars", "wire"]) {
    const own = rows.map((row) => row[key]);
    found[key] = [mean(own), deviation(own)];
  }
  found.result = Object.fromEntries(Object.keys(COSTS).map((key) => [key, mean(results.map((own) => own[key]))]));
  const at = crossings(run), said = never(at);
  const to = (value) => {
    if (said) return said;
    const own = begun(run).map((seed, s) => value(seed, at[s]));
    return [mean(own), deviation(own)];
  };
  const least = (cost) => (seed, own) => Math.min(...own.results.map((i) => cost(seed, i)));
  found["steps to target"] = to((seed, own) => own.step);
  found["wire MB to target"] = to(least((seed, i) => wireOf(seed, i) / 1e6));
  found["hours to target"] = to(least((seed, i) => secondsOf(seed, i) / 3600));
  return found;
};
