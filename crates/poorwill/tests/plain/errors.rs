//! An error prints its cause once, and the chain prints all causes.

use std::error::Error;
use std::{io, iter};

use poorwill::budget::InvalidCaps;
use poorwill::checkpoint::CheckpointError;
use poorwill::model::ModelError;
use poorwill::offload::LoadError;
use poorwill::pool::Phase;
use poorwill::{DeviceSpec, DriverError, Op, OpenError, PoolError, Tag, chain};

fn of_driver() -> DriverError {
    DriverError::invalid(Op::Map, "no such place")
}

fn of_system() -> io::Error {
    io::Error::other("no such thing")
}

/// One of each kind that has a cause and that callers can make.
fn with_causes() -> Vec<Box<dyn Error>> {
    let (tag, tensor, path) = (Tag::weights(), || "a.b".to_owned(), || "x.safetensors".into());
    let of_pool = || Box::new(PoolError::Driver { op: "read", source: of_driver() });
    vec![
        Box::new(PoolError::AllocFailed { bytes: 7, tag, source: of_driver() }),
        Box::new(PoolError::SleepFailed { phase: Phase::Copy, source: of_driver() }),
        Box::new(PoolError::Stranded {
            phase: Phase::Unmap,
            tags: "weights".into(),
            source: of_driver().into(),
            undo: DriverError::invalid(Op::Unmap, "not again").into(),
        }),
        Box::new(PoolError::PrepareFailed { source: of_driver() }),
        Box::new(PoolError::WakeFailed { phase: Phase::Map, source: of_driver() }),
        of_pool(),
        Box::new(OpenError::Device { device: DeviceSpec::host(), source: of_driver() }),
        Box::new(OpenError::Pool(*of_pool())),
        Box::new(ModelError::Alloc { path: path(), tensor: tensor(), bytes: 7, source: of_pool() }),
        Box::new(ModelError::Pool { tensor: tensor(), source: of_pool() }),
        Box::new(ModelError::Copy { tensor: tensor(), source: of_driver() }),
        Box::new(ModelError::Stream(of_driver())),
        Box::new(LoadError::Memory { bytes: 7, buffers: 1, source: of_driver() }),
        Box::new(CheckpointError::Io { path: path(), operation: "open", source: of_system() }),
        Box::new(CheckpointError::TooManyOpenFiles { path: path(), open_files: 7, source: of_system() }),
    ]
}

#[test]
fn a_cause_is_said_once() {
    for error in with_causes() {
        let mut causes: Vec<&dyn Error> = vec![&*error];
        causes.extend(iter::successors(error.source(), |cause: &&(dyn Error + 'static)| (*cause).source()));
        assert!(causes.len() > 1, "{error:?} has lost its cause");
        let said: Vec<String> = causes.iter().map(ToString::to_string).collect();
        for (nth, words) in said.iter().enumerate() {
            let repeats = said[nth + 1..].iter().any(|cause| words.contains(cause.as_str()));
            assert!(!repeats, "{said:?}");
        }
        assert_eq!(chain(&*error), said.join(": "));
    }
}

#[test]
fn what_is_parsed_says_all_at_once() {
    let of_device = "host:much".parse::<DeviceSpec>().unwrap_err();
    let of_caps = "cuda:0=much".parse::<poorwill::budget::Caps>().unwrap_err();
    assert!(matches!(of_caps, InvalidCaps::Cap { .. }));
    for error in [&of_device as &dyn Error, &of_caps] {
        assert!(error.source().is_none() && error.to_string().contains("`much`"), "{error}");
    }
}
