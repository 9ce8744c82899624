-- For each year and host, the share of a step by which its ranks are later than the median rank of the same step.
-- The rows are those of `ddpobs export RUN -o runs/RUN.parquet`. Run it in DuckDB.
WITH files AS (
    SELECT file_name AS filename, decode(value)::JSON AS facts
    FROM parquet_kv_metadata('runs/*.parquet')
    WHERE decode(key) = 'ddpobs'
), hosts AS (
    SELECT
        filename,
        year(make_timestamp((facts ->> 'began_ns')::BIGINT // 1000)) AS year,
        unnest(from_json(facts -> 'ranks', '[{"rank": "BIGINT", "host": "VARCHAR"}]'), recursive := true)
    FROM files
), steps AS (
    SELECT
        filename, rank, end_ns - start_ns AS step_ns,
        own_ns - median(own_ns) OVER (PARTITION BY filename, collective) AS late_ns
    FROM read_parquet('runs/*.parquet', filename = true)
)
SELECT
    year, host, count(DISTINCT filename) AS runs,
    sum(step_ns) / 3.6e12 AS rank_hours, sum(late_ns) / sum(step_ns) AS late
FROM steps JOIN hosts USING (filename, rank)
GROUP BY year, host
ORDER BY late DESC
