import { seconds } from "../format";

export interface Phase {
  name: string;
  seconds: number;
}

/** The phases of a step, as wide as they are long; names that do not fit stand in the legend alone. */
export function Lane({ phases, label }: { phases: readonly Phase[]; label: string }) {
  const total = phases.reduce((sum, phase) => sum + phase.seconds, 0);
  if (total <= 0) return <p class="notice">No times were recorded for this step.</p>;
  return (
    <>
      <div class="lane" role="img" aria-label={`${label}: ${phases.map((phase) => `${phase.name} ${seconds(phase.seconds)}`).join(", ")}`}>
        {phases.map((phase, index) => (
          <span key={phase.name} class={`p${index % 7}`} style={{ width: `${((phase.seconds / total) * 100).toFixed(2)}%` }}>
            {phase.seconds / total > 0.14 ? `${phase.name} ${seconds(phase.seconds)}` : ""}
          </span>
        ))}
      </div>
      <p class="legend" aria-hidden="true">
        {phases.map((phase, index) => (
          <span key={phase.name}>
            <i class={`key p${index % 7}`} />
            {phase.name} {seconds(phase.seconds)}
          </span>
        ))}
      </p>
    </>
  );
}
