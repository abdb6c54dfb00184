/** Trains one network beside the page: it is started, paused, stepped; the page gets points as they are measured. */
import { RUNS, Schedule, measured } from "./index.mjs";

const SLICE = 24; // milliseconds of training between messages
let run = null, schedule = null, id = 0, running = false, waiting = 0;

function send(points) {
  const { step, time, end, parameters } = run;
  const said = run.said?.() ?? "";
  postMessage({ id, points, step, time, end, parameters, said, suggested: run.suggested?.() ?? null, over: schedule.over, failed: run.failed === true });
}

/** Train for a slice of time, or for a single step; what is due is measured before the step that passes it. */
function work(single) {
  const points = [], until = performance.now() + SLICE;
  do {
    if (schedule.over) break;
    run.advance();
    if (single || schedule.due() || schedule.over) points.push(...measured(run));
  } while (!single && performance.now() < until);
  send(points);
  if (running && !schedule.over) waiting = setTimeout(work, 0, false);
}

onmessage = ({ data }) => {
  clearTimeout(waiting);
  if (data.start) {
    id = data.id;
    run = new RUNS[data.topic](data.start);
    schedule = new Schedule(run);
    schedule.due();
    running = data.running;
    send(measured(run));
  } else if (data.single) running = false;
  else running = data.running;
  if (!run) return;
  if (data.single) work(true);
  else if (running && !schedule.over) waiting = setTimeout(work, 0, false);
};
