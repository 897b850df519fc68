//! A process that has no descriptor left.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;

use poorwill_testkit::device::{TestDevice, skipped_unless};
use poorwill_testkit::watchdog::watched;

#[test]
fn an_import_that_cannot_be_kept_is_an_error_and_the_device_goes_on() {
    const CHILD: &str = "POORWILL_TEST_FEW_DESCRIPTORS";
    let device = TestDevice::open(16);
    let shares_memory = device.info().memory_name.is_some();
    if skipped_unless(|_| shares_memory, "the device has no descriptors of its memory") {
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        let child = Command::new("sh")
            .args(["-c", "ulimit -n 128 && exec \"$0\" --exact \"$1\""])
            .arg(std::env::current_exe().unwrap())
            .arg(std::thread::current().name().unwrap())
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    watched(move || {
        let bytes = 2 * device.info().granule_bytes;
        let free_bytes = device.memory_info().unwrap().free_bytes;
        let shared = device.create_shared(bytes).unwrap();
        let descriptor = device.export(shared).unwrap();
        let mut fillers: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        device.import(descriptor.as_fd(), bytes).unwrap_err();
        // An import takes several, and may lack any of them.
        let imported = loop {
            fillers.pop().unwrap();
            if let Ok(imported) = device.import(descriptor.as_fd(), bytes) {
                break imported;
            }
        };
        device.release(imported).unwrap();
        device.release(shared).unwrap();
        drop(descriptor);
        assert_eq!(device.memory_info().unwrap().free_bytes, free_bytes);
    });
}
