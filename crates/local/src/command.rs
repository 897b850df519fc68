//! The commands, and what their options mean together.

use std::process::ExitCode;

use clap::Subcommand;
use clap::error::ErrorKind;
use poorwill::DeviceSpec;

use crate::arguments::other_device;
use crate::bench::{self, BenchArgs, Benchmark};
use crate::demo::{self, DemoArgs};
use crate::doctor::{self, DoctorArgs};
use crate::failure;
use crate::hibernate::{self, HibernateArgs};
use crate::verify::{self, VerifyArgs};

/// The commands that the program `poorwill` has beside these: its services, and what describes all commands.
pub const SERVICES: &[&str] =
    &["replay", "rotate", "route", "fleet", "broker", "completions", "man", "mock-engine", "reference"];

/// A command that needs no service.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Load a small generated checkpoint, put it to sleep, wake it and verify every tensor; then measure large loads
    ///
    /// Needs no GPU. The checkpoint is a mixture of experts in a temporary folder. The large loads only allocate and
    /// free, as loading a large model does.
    Demo(DemoArgs),
    /// Load safetensors files, put them to sleep, wake them, and verify every tensor
    Verify(VerifyArgs),
    /// Take processes off their GPUs, so that engines that sleep leave nothing there, or put them back
    ///
    /// All processes that are named are one set: all go, or none. They are another program's, and run on without their
    /// devices. Let them sleep first. New work waits until they are back, but the driver ends a process that looks at a
    /// stream or an event meanwhile.
    Hibernate(HibernateArgs),
    /// Report the devices, the sources and limits of their memory, what an engine may use, and likely problems
    Doctor(DoctorArgs),
    /// Run a benchmark
    Bench(BenchArgs),
}

impl Command {
    /// Runs it to its end.
    #[must_use]
    pub fn run(self) -> ExitCode {
        match self {
            Self::Demo(args) => failure::finish(args.json, demo::run(&args)),
            Self::Verify(args) => failure::finish(args.json, verify::run(&args)),
            Self::Hibernate(args) => hibernate::run(args),
            Self::Doctor(args) => failure::finish(args.json, doctor::run(&args)),
            Self::Bench(args) => bench::run(args.bench),
        }
    }

    /// A budget that names devices, but not the one in use.
    #[must_use]
    pub fn mistake(&self) -> Option<(ErrorKind, String)> {
        let (caps, device) = match self {
            Self::Demo(args) => (args.budget.caps(), args.device.clone().unwrap_or(DeviceSpec::host())),
            Self::Verify(args) => (args.budget.caps(), args.device.clone()),
            Self::Bench(BenchArgs { bench }) => match bench {
                Benchmark::Churn(args) => (args.budget.caps(), args.device.clone()),
                Benchmark::Sleep(args) => (args.budget.caps(), args.device.clone()),
                Benchmark::Offload(args) => (args.budget.caps(), args.device.clone()),
                Benchmark::Load(args) => (args.budget.caps(), args.device.clone()),
            },
            // Without a device it examines all.
            Self::Doctor(args) => (args.budget.as_ref(), args.device.clone()?),
            Self::Hibernate(_) => return None,
        };
        let other = other_device(caps, &device)?;
        let message = format!(
            "--budget names {other}, and the device is {}; name that one with --device, or none",
            device.id()
        );
        Some((ErrorKind::ValueValidation, message))
    }
}
