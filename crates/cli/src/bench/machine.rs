//! Where numbers were measured, and by which build.

use serde::{Deserialize, Serialize};
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

use crate::devices;

/// This program and its version.
pub const ENGINE: &str = concat!("lily ", env!("CARGO_PKG_VERSION"));

/// The commit this binary was built from, with `-dirty` if files differed from it; `None` outside a git repository.
pub const COMMIT: Option<&str> = option_env!("LILY_COMMIT");

/// The machine as records name it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: String,
    /// Physical cores, as far as the system tells them.
    pub cores: usize,
    pub memory_bytes: u64,
    pub os: String,
}

impl Machine {
    /// This one.
    pub fn here() -> Machine {
        let what = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(what);
        let cpus = system.cpus();
        Machine {
            cpu: cpus.first().map_or_else(String::new, |cpu| cpu.brand().trim().to_owned()),
            cores: System::physical_core_count().unwrap_or(cpus.len()),
            memory_bytes: system.total_memory(),
            os: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }
}

/// The most memory that this process ever had resident, mapped weights included; where the system does not keep it, what
/// it has now.
pub fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    high_water_mark(&status).unwrap_or_else(devices::resident_memory)
}

/// `VmHWM` of a Linux process status, in bytes.
fn high_water_mark(status: &str) -> Option<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_high_water_mark_is_read_in_kibibytes() {
        assert_eq!(high_water_mark("Name:\tlily\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\n"), Some(2048 * 1024));
        assert_eq!(high_water_mark("Name:\tlily\n"), None);
        assert!(peak_memory() > 0);
    }
}
