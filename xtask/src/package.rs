// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo xtask package`: Debian packages, RPM packages and a tarball.
//!
//! One tree of files is the source of all packages: the tarball contains the tree unchanged, debhelper takes
//! the packages' files from the tree by `packaging/debian`, and rpmbuild by
//! `packaging/vhost-device-ism.spec`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::machine::Machine;
use crate::pages::{PAGES, packaged};
use crate::tool::{self, ToolError, at};
use crate::{library_page, packages, third_party};

pub(crate) const LONG_ABOUT: &str = "\
Build Debian packages and a tarball of the release build, in target/package.

The packages are vhost-device-ism, smc, smc-run, libsmc0, libsmc-dev and virtio-ism-dkms. They are built \
by debhelper, and checked by lintian. Packages whose names end in -dbgsym have the debug symbols of the \
programs; with DEB_BUILD_OPTIONS=noautodbgsym there are none. With --rpm, the same packages but \
virtio-ism-dkms and those of debug symbols are built by rpmbuild, too, and checked by rpmlint. A \
finding of these is a failure. The tarball has the same programs, libraries, manual pages and \
completions, and can be unpacked anywhere.

With --machine the packages are for another machine, in target/package-MACHINE. They are built by its \
compiler in Debian, and qemu-user runs the command that writes the manual pages. Those of s390x have no \
library for \"smc run\".";

/// Debian packages needed for any build, and a program of each.
const TOOLS: [(&str, &str); 5] = [
    ("dpkg-buildpackage", "dpkg-dev"),
    ("dh", "debhelper"),
    ("dh_apparmor", "dh-apparmor"),
    ("dh_dkms", "dh-dkms"),
    ("lintian", "lintian"),
];

/// The same for RPM packages.
const RPM_TOOLS: [(&str, &str); 2] = [("rpmbuild", "rpm"), ("rpmlint", "rpmlint")];

/// Most bytes of the stripped command. A larger command is linked with an unintended library.
const MAX_SMC: u64 = 14 << 20;

/// Options of `cargo xtask package`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only the tarball, which needs no tools of Debian.
    #[arg(long)]
    pub(crate) tarball: bool,

    /// RPM packages, too.
    #[arg(long, conflicts_with = "tarball")]
    pub(crate) rpm: bool,

    /// The machine of the packages [default: this one].
    #[arg(long, value_name = "MACHINE")]
    pub(crate) machine: Option<Machine>,

    /// Install missing Debian packages, as root. CI=true says the same.
    #[arg(long)]
    pub(crate) install_deps: bool,
}

/// Runs the task, and prints the paths of its results.
///
/// # Errors
/// Tools are missing, a build fails, or lintian reports a fault.
pub(crate) fn run(args: &Args, root: &Path) -> Result<ExitCode, ToolError> {
    let root = fs::canonicalize(root).map_err(at(root))?;
    print(&make(args, &root, &target(&root), None)?)
}

/// Prints paths with the sizes of the files.
pub(crate) fn print(files: &[PathBuf]) -> Result<ExitCode, ToolError> {
    for path in files {
        let size = fs::metadata(path).map_err(at(path))?.len();
        println!("{} ({} KiB)", path.display(), size.div_ceil(1024));
    }
    Ok(ExitCode::SUCCESS)
}

/// cargo's directory for results.
pub(crate) fn target(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// Makes the packages below `target`, with other flags for rustc if any.
///
/// # Errors
/// Tools are missing, a build fails, or lintian reports a fault.
pub(crate) fn make(
    args: &Args,
    root: &Path,
    target: &Path,
    flags: Option<&str>,
) -> Result<Vec<PathBuf>, ToolError> {
    if !args.tarball {
        let rpm = RPM_TOOLS.iter().filter(|_| args.rpm);
        let needed: Vec<_> = TOOLS.iter().chain(rpm).copied().collect();
        tools(&needed, args.install_deps || tool::is_true("CI"))?;
    }
    // The leftovers of an interrupted run are no package.
    let machine = args.machine.unwrap_or_else(Machine::own);
    if !machine.is_own() {
        machine.ensure(args.install_deps || tool::is_true("CI"))?;
    }
    let (place, finished) = (target.join("package.new"), finished(target, args.machine));
    remove(&place)?;
    let build = place.join("build");
    let tree = build.join("tree");
    eprintln!("building the programs");
    build_programs(root, target, flags, machine)?;
    make_tree(root, &machine.built(target, "release"), &tree, machine)?;
    let mut made = Vec::new();
    if !args.tarball {
        eprintln!("packing for Debian, in some minutes: {}", place.join("debian.log").display());
        // debhelper makes packages of the debug information, and strips copies.
        made.extend(debian(root, &build, &place, machine)?);
    }
    eprintln!("packing the archive");
    strip(&tree, machine)?;
    made.push(tarball(&tree, &place, machine)?);
    if args.rpm {
        eprintln!("packing for rpm: {}", place.join("rpm.log").display());
        made.extend(rpm(root, &build, &tree, &place, machine)?);
    }
    remove(&finished)?;
    fs::rename(&place, &finished).map_err(at(&finished))?;
    Ok(made.iter().map(|path| finished.join(path.strip_prefix(&place).unwrap_or(path))).collect())
}

/// The directory of finished packages.
pub(crate) fn finished(target: &Path, machine: Option<Machine>) -> PathBuf {
    match machine.filter(|machine| !machine.is_own()) {
        Some(machine) => target.join(format!("package-{}", machine.name())),
        None => target.join("package"),
    }
}

pub(crate) fn remove(directory: &Path) -> Result<(), ToolError> {
    match directory.exists() {
        true => fs::remove_dir_all(directory).map_err(at(directory)),
        false => Ok(()),
    }
}

pub(crate) fn tools(needed: &[(&str, &str)], install: bool) -> Result<(), ToolError> {
    let missing = || -> Vec<String> {
        let missing = needed.iter().filter(|(program, _)| !packages::has_program(program));
        missing.map(|(_, package)| (*package).to_owned()).collect()
    };
    if install && !missing().is_empty() {
        packages::apt_install(&missing())?;
    }
    match missing() {
        none if none.is_empty() => Ok(()),
        missing => Err(ToolError::Packages(missing)),
    }
}

/// Lays out the manual pages.
fn manual_pages(root: &Path, tree: &Path, mut smc: Command) -> Result<(), ToolError> {
    // The command writes the pages of other programs, too.
    let manual = tree.join("share/man/man1");
    tool::succeed(smc.arg("man").arg(&manual))?;
    let others =
        ["vhost-device-ism.8", "smcss.8", "smcd.8", "smcr.8", "smc.toml.5", "smc-policy.5"];
    let header = root.join("guest-driver/c/include/smc.h");
    let header = fs::read_to_string(&header).map_err(at(&header))?;
    write(&manual.join("libsmc.3"), &library_page::of(&header))?;
    for page in others.into_iter().chain(["smc.7", "libsmc.3"]) {
        let section = page.rsplit('.').next().unwrap_or_default();
        let to = tree.join(format!("share/man/man{section}")).join(page);
        let directory = to.parent().unwrap_or(tree);
        fs::create_dir_all(directory).map_err(at(directory))?;
        fs::rename(manual.join(page), &to).map_err(at(&to))?;
    }
    Ok(())
}

/// The version reported by programs of a package, with the commit if known.
fn version(root: &Path) -> String {
    let mut git = Command::new("git");
    git.current_dir(root).args(["describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]);
    match tool::output(git) {
        Ok(commit) if !commit.trim().is_empty() => {
            format!("{} ({})", env!("CARGO_PKG_VERSION"), commit.trim())
        }
        _ => env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// Files to install: source, destination below a prefix, and mode.
fn files(root: &Path, release: &Path) -> [(PathBuf, &'static str, u32); 22] {
    let packaging = root.join("packaging");
    [
        (release.join("smc"), "bin/smc", 0o755),
        (release.join("vhost-device-ism"), "bin/vhost-device-ism", 0o755),
        // For the image of packaging/kubernetes, left out by the packages.
        (release.join("smc-device-plugin"), "libexec/smc-device-plugin", 0o755),
        (packaging.join("smc_run"), "bin/smc_run", 0o755),
        (release.join("libsmc_preload.so"), "lib/smc/libsmc_preload.so", 0o644),
        (release.join("libsmc.so"), "lib/libsmc.so.0", 0o644),
        (root.join("guest-driver/c/include/smc.h"), "include/smc.h", 0o644),
        (root.join("guest-driver/c/examples/echo.c"), "doc/examples/echo.c", 0o644),
        (packaging.join("smc_run.8"), "share/man/man8/smc_run.8", 0o644),
        (packaging.join("service.conf"), "doc/examples/service.conf", 0o644),
        (packaging.join("vhost-device-ism.toml"), "etc/vhost-device-ism.toml", 0o644),
        (
            root.join("backend/systemd/vhost-device-ism.service"),
            "systemd/vhost-device-ism.service",
            0o644,
        ),
        (
            packaging.join("vhost-device-ism.sysusers"),
            "systemd/sysusers.d/vhost-device-ism.conf",
            0o644,
        ),
        (
            packaging.join("vhost-device-ism.tmpfiles"),
            "systemd/tmpfiles.d/vhost-device-ism.conf",
            0o644,
        ),
        (
            packaging.join("vhost-device-ism.socket"),
            "systemd/examples/vhost-device-ism.socket",
            0o644,
        ),
        (
            packaging.join("grafana-dashboard.json"),
            "share/vhost-device-ism/grafana-dashboard.json",
            0o644,
        ),
        (
            packaging.join("grafana-programs.json"),
            "share/vhost-device-ism/grafana-programs.json",
            0o644,
        ),
        (
            packaging.join("prometheus-alerts.yaml"),
            "share/vhost-device-ism/prometheus-alerts.yaml",
            0o644,
        ),
        (packaging.join("apparmor-profile"), "etc/apparmor.d/vhost-device-ism", 0o644),
        (packaging.join("INSTALL.md"), "INSTALL.md", 0o644),
        (root.join("LICENSE-APACHE"), "doc/LICENSE-APACHE", 0o644),
        (root.join("LICENSE-BSD-3-Clause"), "doc/LICENSE-BSD-3-Clause", 0o644),
    ]
}

/// A build by cargo in release mode.
pub(crate) fn cargo_build(
    root: &Path,
    target: &Path,
    flags: Option<&str>,
    machine: Machine,
) -> Command {
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    build.current_dir(root).args(["build", "--release"]).env("SMC_VERSION", version(root));
    build.env("CARGO_TARGET_DIR", target);
    machine.set_target(&mut build);
    if let Some(flags) = flags {
        build.env("CARGO_ENCODED_RUSTFLAGS", flags);
    }
    build
}

fn build_programs(
    root: &Path,
    target: &Path,
    flags: Option<&str>,
    machine: Machine,
) -> Result<(), ToolError> {
    let mut build = cargo_build(root, target, flags, machine);
    if !machine.is_own() {
        build.args(["--exclude", "smc-tests", "--exclude", "xtask"]);
    }
    if !machine.has_smc_run() {
        build.args(["--exclude", "smc-preload"]);
    }
    // With the features of the whole workspace, like other builds.
    build.args(["--workspace", "--lib", "--bin", "smc", "--bin", "vhost-device-ism"]);
    tool::succeed(build.args(["--bin", "smc-device-plugin"]))
}

/// Lays out the files for installation below a prefix.
fn make_tree(root: &Path, release: &Path, tree: &Path, machine: Machine) -> Result<(), ToolError> {
    let is_for = |to: &str| machine.has_smc_run() || !to.starts_with(PRELOADED);
    for (from, to, mode) in files(root, release).into_iter().filter(|(_, to, _)| is_for(to)) {
        let to = tree.join(to);
        let directory = to.parent().unwrap_or(tree);
        fs::create_dir_all(directory).map_err(at(directory))?;
        let mut install = Command::new("install");
        tool::succeed(install.arg(format!("-m{mode:o}")).arg(&from).arg(&to))?;
    }
    for (from, name) in PAGES {
        let text = fs::read_to_string(root.join(from)).map_err(at(from.as_ref()))?;
        write(&tree.join("doc").join(name), &packaged(from, &text))?;
    }
    let program = tree.join("bin/smc");
    let smc = || machine.run(&program);
    manual_pages(root, tree, smc())?;
    // Other names of the command, for the behaviour of smc-tools; and the library's name for linkers.
    let links = [("bin/smcss", "smc"), ("bin/smcd", "smc"), ("bin/smcr", "smc")];
    for (link, to) in links.into_iter().chain([("lib/libsmc.so", "libsmc.so.0")]) {
        let link = tree.join(link);
        std::os::unix::fs::symlink(to, &link).map_err(at(&link))?;
    }
    if machine.has_smc_run() {
        // /etc/ld.so.preload of containers: the command writes the file beside the library.
        let mut list = smc();
        list.args(["cdi", "--later", "--pool", "/run/vhost-device-ism/any/any.sock"]);
        tool::output(list)?;
    }
    kernel_driver(&root.join("guest-driver/kernel"), &tree.join("src"))?;
    write(&tree.join("lib/pkgconfig/smc.pc"), &pkg_config(root)?)?;
    completions(tree, smc)?;
    write(&tree.join("doc/third-party-licences.txt"), &third_party::licences(root)?)
}

/// Lays out the completions of shells. The command knows the other programs, too.
fn completions(tree: &Path, smc: impl Fn() -> Command) -> Result<(), ToolError> {
    for program in ["smc", "vhost-device-ism", "smcss", "smcd", "smcr"] {
        for (shell, file) in [
            ("bash", format!("share/bash-completion/completions/{program}")),
            ("fish", format!("share/fish/vendor_completions.d/{program}.fish")),
            ("zsh", format!("share/zsh/vendor-completions/_{program}")),
        ] {
            let mut completions = smc();
            completions.args(["completions", shell, program]);
            write(&tree.join(file), &tool::output(completions)?)?;
        }
    }
    Ok(())
}

/// The directory of the library for `smc run`.
const PRELOADED: &str = "lib/smc/";

/// Files of the tree with debug information.
pub(crate) const PROGRAMS: [&str; 5] = [
    "bin/smc",
    "bin/vhost-device-ism",
    "libexec/smc-device-plugin",
    "lib/smc/libsmc_preload.so",
    "lib/libsmc.so.0",
];

/// Takes the debug information from the programs.
fn strip(tree: &Path, machine: Machine) -> Result<(), ToolError> {
    let strip = if machine.is_own() { "strip".to_owned() } else { machine.program("strip") };
    for program in PROGRAMS.map(|name| tree.join(name)).iter().filter(|program| program.exists()) {
        tool::succeed(Command::new(&strip).arg("--strip-unneeded").arg(program))?;
    }
    let smc = tree.join("bin/smc");
    let size = fs::metadata(&smc).map_err(at(&smc))?.len();
    if size > MAX_SMC {
        let what = format!("has {size} bytes, more than {MAX_SMC}");
        return Err(ToolError::Answer { program: "smc".into(), what });
    }
    Ok(())
}

/// The sources of the driver for the kernel, in a directory with the name expected by DKMS.
fn kernel_driver(from: &Path, to: &Path) -> Result<(), ToolError> {
    let config = from.join("dkms.conf");
    let text = fs::read_to_string(&config).map_err(at(&config))?;
    let [name, version] = ["PACKAGE_NAME=", "PACKAGE_VERSION="].map(|key| {
        let value = text.lines().find_map(|line| line.strip_prefix(key));
        value.unwrap_or_default().trim_matches('"').to_owned()
    });
    let to = to.join(format!("{name}-{version}"));
    let header = "include/uapi/linux/virtio_ism.h";
    let entries = fs::read_dir(from).map_err(at(from))?.flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_source = |name: &String| {
        let end = Path::new(name).extension().and_then(|end| end.to_str());
        matches!(end, Some("c" | "h" | "conf")) || matches!(name.as_str(), "Kbuild" | "Makefile")
    };
    for name in names.filter(is_source).chain([header.to_owned()]) {
        let mut install = Command::new("install");
        install.args(["-m644", "-D"]).arg(from.join(&name)).arg(to.join(&name));
        tool::succeed(&mut install)?;
    }
    Ok(())
}

/// The library's file for pkg-config, independent of the place of the tree.
fn pkg_config(root: &Path) -> Result<String, ToolError> {
    let template = root.join("guest-driver/c/smc.pc.in");
    let text = fs::read_to_string(&template).map_err(at(&template))?;
    let text = text.replace("@prefix@", "${pcfiledir}/../..");
    let text = text.replace("@libdir@", "${prefix}/lib");
    Ok(text.replace("@version@", env!("CARGO_PKG_VERSION")))
}

pub(crate) fn write(path: &Path, text: &str) -> Result<(), ToolError> {
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory).map_err(at(directory))?;
    fs::write(path, text).map_err(at(path))
}

/// Packs the tree. The same files make the same bytes.
fn tarball(tree: &Path, place: &Path, machine: Machine) -> Result<PathBuf, ToolError> {
    let name = format!("vhost-device-ism-{}-{}", env!("CARGO_PKG_VERSION"), machine.name());
    let path = place.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    tar.arg(format!("--mtime=@{}", epoch())).arg(format!("--transform=s,^\\./,{name}/,"));
    tool::succeed(tar.arg("--file").arg(&path).arg("--directory").arg(tree).arg("./"))?;
    Ok(path)
}

/// When this was made, for files: the time of the last commit, or SOURCE_DATE_EPOCH.
pub(crate) fn epoch() -> String {
    std::env::var("SOURCE_DATE_EPOCH").ok().unwrap_or_else(|| {
        let mut git = Command::new("git");
        git.args(["log", "-1", "--format=%ct"]);
        tool::output(git).map_or_else(|_| "0".into(), |text| text.trim().to_owned())
    })
}

/// A list of debhelper without the library for `smc run`.
fn without_library(list: &str) -> String {
    list.lines().filter(|line| !line.contains(PRELOADED)).map(|line| format!("{line}\n")).collect()
}

/// Has debhelper make the packages, and lintian look at them.
fn debian(
    root: &Path,
    build: &Path,
    place: &Path,
    machine: Machine,
) -> Result<Vec<PathBuf>, ToolError> {
    let debian = build.join("debian");
    tool::succeed(Command::new("cp").arg("-r").arg(root.join("packaging/debian")).arg(&debian))?;
    for (from, to) in [
        ("backend/systemd/vhost-device-ism.service", "vhost-device-ism.service"),
        ("packaging/vhost-device-ism.sysusers", "vhost-device-ism.sysusers"),
        ("packaging/vhost-device-ism.tmpfiles", "vhost-device-ism.tmpfiles"),
        ("guest-driver/c/smc.pc.in", "smc.pc.in"),
    ] {
        let from = root.join(from);
        fs::copy(&from, debian.join(to)).map_err(at(&from))?;
    }
    if !machine.has_smc_run() {
        let list = debian.join("smc.install");
        let text = fs::read_to_string(&list).map_err(at(&list))?;
        write(&list, &without_library(&text))?;
    }
    let mut date = Command::new("date");
    date.args(["--utc", "--rfc-email"]).arg(format!("--date=@{}", epoch()));
    let date = tool::output(date)?;
    let changelog = format!(
        "vhost-device-ism ({}) unstable; urgency=medium\n\n  * See CHANGELOG.md of the sources.\n\n \
         -- The vhost-device-ism developers <vhost-device-ism@example.org>  {date}",
        env!("CARGO_PKG_VERSION")
    );
    write(&debian.join("changelog"), &changelog)?;
    let mut dpkg = Command::new("dpkg-buildpackage");
    dpkg.current_dir(build).args(["--build=binary", "--no-sign"]).env("SOURCE_DATE_EPOCH", epoch());
    if !machine.is_own() {
        dpkg.args(["--host-arch", machine.of_debian()]);
    }
    succeed_quietly(dpkg, &place.join("debian.log"))?;
    let made = files_of(place, "deb")?;
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on", "error,warning", "--suppress-tags-from-file"]);
    lintian.arg(root.join("packaging/lintian-suppressed")).args(&made);
    tool::succeed(&mut lintian)?;
    Ok(made)
}

/// Has rpmbuild make the packages, and rpmlint look at them.
fn rpm(
    root: &Path,
    build: &Path,
    tree: &Path,
    place: &Path,
    machine: Machine,
) -> Result<Vec<PathBuf>, ToolError> {
    let mut date = Command::new("date");
    date.env("LC_ALL", "C").args(["--utc", "+%a %b %d %Y"]).arg(format!("--date=@{}", epoch()));
    let date = tool::output(date)?;
    let mut rpmbuild = Command::new("rpmbuild");
    rpmbuild.arg("-bb").env("SOURCE_DATE_EPOCH", epoch());
    if !machine.is_own() {
        rpmbuild.args(["--target", &format!("{}-linux", machine.name())]);
    }
    for (name, value) in [
        ("_topdir", build.join("rpm").into_os_string()),
        ("_rpmdir", place.into()),
        ("_rpmfilename", "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm".into()),
        ("_buildhost", "reproducible".into()),
        ("use_source_date_epoch_as_buildtime", "1".into()),
        ("clamp_mtime_to_source_date_epoch", "1".into()),
        ("tree", tree.into()),
        ("version", env!("CARGO_PKG_VERSION").into()),
        ("date", date.trim().into()),
    ] {
        let mut define = std::ffi::OsString::from(format!("{name} "));
        define.push(value);
        rpmbuild.arg("--define").arg(define);
    }
    rpmbuild.arg(root.join("packaging/vhost-device-ism.spec"));
    succeed_quietly(rpmbuild, &place.join("rpm.log"))?;
    let made = files_of(place, "rpm")?;
    let mut rpmlint = Command::new("rpmlint");
    rpmlint.arg("--rpmlintrc").arg(root.join("packaging/rpmlintrc")).args(&made);
    succeed_quietly(rpmlint, &place.join("rpmlint.log"))?;
    Ok(made)
}

/// Runs a program with a page of progress as output, shown only after a failure.
fn succeed_quietly(mut command: Command, log: &Path) -> Result<(), ToolError> {
    let file = fs::File::create(log).map_err(at(log))?;
    let errors = file.try_clone().map_err(at(log))?;
    command.stdout(file).stderr(errors);
    let succeeded = tool::succeed(&mut command);
    if succeeded.is_err() {
        eprintln!("{}", fs::read_to_string(log).unwrap_or_default());
    }
    succeeded
}

/// The files in a directory whose names end so, by name.
pub(crate) fn files_of(place: &Path, end: &str) -> Result<Vec<PathBuf>, ToolError> {
    let entries = fs::read_dir(place).map_err(at(place))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|own| own == end));
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_another_machine_have_their_own_place_and_lack_what_is_not_for_the_machine() {
        let target = Path::new("/t");
        let foreign = [Machine::Aarch64, Machine::S390x].into_iter().find(|other| !other.is_own());
        assert_eq!(finished(target, Some(Machine::own())), finished(target, None));
        assert_ne!(finished(target, foreign), finished(target, None));
        let all = files(Path::new("/r"), target);
        let left_out = all.iter().filter(|(_, to, _)| to.starts_with(PRELOADED)).count();
        assert_eq!((left_out, Machine::S390x.has_smc_run()), (1, false));
        let list = include_str!("../../packaging/debian/smc.install");
        assert_eq!(without_library(list).lines().count() + 2, list.lines().count());
        assert!(without_library(list).starts_with("tree/bin/smc usr/bin\n"));
    }
}
