//! The side of a process that is asked.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use poorwill_core::hibernation::{CheckpointErrorKind, CheckpointStep};
use rustix::net::{RecvFlags, recv, sockopt};

use super::position::Steps;
use super::wire::{Answer, REQUEST_BYTES_MAX, Request, write_answer};

/// A caller sends its line at once.
const REQUEST_MAX: Duration = Duration::from_secs(5);

/// Answers each caller on a thread of its own, until the process leaves.
pub(super) fn serve(listener: &UnixListener, steps: &Arc<Steps>) {
    while !steps.has_left() {
        match listener.accept() {
            Ok((caller, _)) => {
                let steps = Arc::clone(steps);
                // Without a thread the caller sees its connection end, and asks again.
                let _ = thread::Builder::new()
                    .name("poorwill-host-step".into())
                    .spawn(move || answer(&caller, &steps));
            }
            // Too many open files, say.
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn answer(mut caller: &UnixStream, steps: &Steps) {
    let Some(request) = request(caller) else { return };
    // While this process was stopped, the caller may have given up.
    if !is_there(caller) {
        return;
    }
    let done = perform(caller, steps, request);
    let is_delivered = caller.write_all(write_answer(&done).as_bytes()).is_ok();
    if !is_delivered && request.step == CheckpointStep::Lock && done.is_ok() {
        // Its caller ended during the wait. Another one may have gone on from here already.
        let _ = steps.unlock();
    }
}

fn request(caller: &UnixStream) -> Option<Request> {
    caller.set_read_timeout(Some(REQUEST_MAX)).ok()?;
    let mut line = String::new();
    BufReader::new(caller.take(REQUEST_BYTES_MAX)).read_line(&mut line).ok()?;
    Request::parse(line.strip_suffix('\n')?)
}

fn perform(caller: &UnixStream, steps: &Steps, request: Request) -> Result<Answer, CheckpointErrorKind> {
    check_user(caller)?;
    match request.step {
        CheckpointStep::State => return Ok(Answer::State(steps.state())),
        CheckpointStep::Inspect => return Ok(Answer::Inspection(steps.inspect())),
        CheckpointStep::Lock => steps.lock(request.wait_max, &|| is_there(caller)),
        CheckpointStep::Checkpoint => steps.checkpoint(),
        CheckpointStep::Restore => steps.restore(),
        CheckpointStep::Unlock => steps.unlock(),
    }
    .map(|()| Answer::Done)
}

fn check_user(caller: &UnixStream) -> Result<(), CheckpointErrorKind> {
    let own = rustix::process::geteuid();
    let reason = match sockopt::socket_peercred(caller) {
        Ok(peer) if peer.uid.is_root() || peer.uid == own => return Ok(()),
        Ok(peer) => {
            format!("it belongs to user {}, and the caller is user {}", own.as_raw(), peer.uid.as_raw())
        }
        Err(error) => format!("the system does not say who asks: {error}"),
    };
    Err(CheckpointErrorKind::NotPermitted { reason })
}

/// A caller sends nothing after its line, and closes its end when it ends or gives up.
fn is_there(caller: &UnixStream) -> bool {
    let read = recv(caller, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    matches!(
        read.map_err(|error| std::io::Error::from(error).kind()),
        Err(ErrorKind::WouldBlock | ErrorKind::Interrupted)
    )
}
