import { useMemo } from "preact/hooks";

interface Option<T extends string> {
  key: T;
  label: string;
  disabled?: boolean;
}

interface Props<T extends string> {
  label: string;
  options: readonly Option<T>[];
  value: T;
  onChange: (value: T) => void;
}

/** Radio buttons in a row: arrow keys choose. */
export function Choice<T extends string>({ label, options, value, onChange }: Props<T>) {
  const name = useMemo(() => `c${Math.random().toString(36).slice(2, 8)}`, []);
  return (
    <span class="row" role="radiogroup" aria-label={label}>
      <span class="small soft" aria-hidden="true">
        {label}
      </span>
      <span class="seg3">
        {options.map((option) => (
          <label key={option.key}>
            <input type="radio" name={name} checked={option.key === value} disabled={option.disabled ?? false} onChange={() => onChange(option.key)} />
            {option.label}
          </label>
        ))}
      </span>
    </span>
  );
}
