# limit_s: 10
exec /nonexistent/program
