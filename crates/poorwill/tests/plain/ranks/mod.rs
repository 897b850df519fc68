//! Groups of ranks: bad requests in one process, and real processes that are stopped and killed.

mod processes;
mod requests;
