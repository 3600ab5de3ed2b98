//! The pages: every link leads to an existing target.

use anyhow::{Context, Result, ensure};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

fn pages() -> Result<Vec<PathBuf>> {
    let mut all: Vec<PathBuf> =
        ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"].map(|p| root().join(p)).into();
    let docs = fs::read_dir(root().join("docs"))?.map(|f| Ok(f?.path())).collect::<Result<Vec<_>>>()?;
    all.extend(docs.into_iter().filter(|p| p.extension().is_some_and(|e| e == "md")));
    Ok(all)
}

/// Lines that are not code.
fn prose(page: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(page).with_context(|| page.display().to_string())?;
    let mut code = false;
    let lines = text.lines().filter(|l| {
        let fence = l.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    });
    Ok(lines.map(str::to_string).collect())
}

/// The anchors of a page's headings, as GitHub and mdBook make them.
fn anchors(page: &Path) -> Result<BTreeSet<String>> {
    let slug = |heading: &str| {
        let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    let heading = |l: &String| l.starts_with('#').then(|| slug(l.trim_start_matches('#')));
    Ok(prose(page)?.iter().filter_map(heading).collect())
}

/// The targets in `](...)`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

#[test]
fn every_link_of_the_pages_leads_somewhere() -> Result<()> {
    let mut seen = 0;
    for page in pages()? {
        for line in prose(&page)? {
            for link in links(&line).filter(|l| !l.contains("://")) {
                let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
                let to = match path {
                    "" => page.clone(),
                    _ => page.parent().unwrap_or(Path::new(".")).join(path),
                };
                let at = format!("{}: `{link}`", page.display());
                ensure!(to.exists(), "{at}: no such file");
                // The site consists of docs/ alone.
                let site = root().join("docs").canonicalize()?;
                let leaves = page.starts_with(root().join("docs")) && !to.canonicalize()?.starts_with(&site);
                ensure!(!leaves, "{at}: leaves the site of docs/: name the file, link nothing");
                ensure!(anchor.is_empty() || anchors(&to)?.contains(anchor), "{at}: no such heading");
                seen += 1;
            }
        }
    }
    ensure!(seen > 100, "{seen} links");
    Ok(())
}

/// The README lists every document.
#[test]
fn the_readme_lists_every_document() -> Result<()> {
    let readme = fs::read_to_string(root().join("README.md"))?;
    for page in pages()? {
        let name = page.strip_prefix(root())?.display().to_string();
        ensure!(
            name == "README.md" || readme.contains(&format!("({name}")),
            "README.md does not name {name}"
        );
    }
    Ok(())
}
